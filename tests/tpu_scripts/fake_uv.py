"""Replaces `uv` on a host of the fake TPU: it makes a venv with the fake jaxllm."""

import json
import os
import sys
from pathlib import Path

CLOUD = Path(os.environ["CLOUD"])


def main(argv: list[str]) -> None:
    with open("uv.jsonl", "a") as calls:
        calls.write(json.dumps(argv) + "\n")
    if argv[0] == "venv":
        bin = Path(argv[-1]) / "bin"
        bin.mkdir(parents=True, exist_ok=True)
        for name in ("jaxllm", "python"):
            (bin / name).unlink(missing_ok=True)
            (bin / name).symlink_to(CLOUD / "bin" / f"host-{name}")


if __name__ == "__main__":
    main(sys.argv[1:])
