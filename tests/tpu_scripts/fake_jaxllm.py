"""Replaces `jaxllm` on a host of the fake TPU: it answers a batch line with the line in upper case.

$CLOUD/preempt_when names a file: when that exists and half of the batch is done, the TPU is
preempted. $CLOUD/fail_with has the exit status of a failing batch. $CLOUD/hold names a file that
the batch waits for.
"""

import json
import os
import sys
import time
from pathlib import Path

CLOUD, HOME = Path(os.environ["CLOUD"]), Path(os.environ["HOME"])


def main(argv: list[str]) -> int:
    (HOME / "argv.json").write_text(json.dumps(argv))
    match argv[0]:
        case "--version":
            print("jaxllm 0")
        case "--help":
            print((CLOUD / "help").read_text())
        case "serve":
            print("serving")
        case "run-batch":
            return run_batch(Path(argv[2]), Path(argv[4]))
    return 0


def run_batch(input: Path, output: Path) -> int:
    print("run-batch", flush=True)
    if HOME.name != "0":
        return 0  # only rank 0 has the frontend
    preempt, fail = CLOUD / "preempt_when", CLOUD / "fail_with"
    wait_for(CLOUD / "hold", gone=True)
    if fail.exists():
        return int(fail.read_text())
    journal = output.with_name(output.name + ".journal")
    journal.mkdir(exist_ok=True)
    (journal / "manifest.json").write_text("{}")
    todo = input.read_text().splitlines()
    done = output.read_text().splitlines() if output.exists() else []
    assert not done or (journal / "journal").exists(), "results without their journal"
    print(f"{len(done)} of {len(todo)} are done", flush=True)
    with open(output, "a") as answers, open(journal / "journal", "a") as counts:
        for number, line in enumerate(todo[len(done) :], len(done)):
            if preempt.exists() and 2 * number >= len(todo):
                wait_for(Path(preempt.read_text()))
                preempt.unlink()
                (CLOUD / "vm").write_text("PREEMPTED")
                return 75
            print(line.upper(), file=answers, flush=True)
            print(".", end="", file=counts, flush=True)
    return 0


def wait_for(path: Path, *, gone: bool = False) -> None:
    for _ in range(6000):
        if path.exists() != gone:
            return
        time.sleep(0.05)
    raise TimeoutError(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
