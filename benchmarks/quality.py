"""What numbers of fewer bits cost: bits per byte of unseen text, for each format of weights and of
cached keys and values.

    python benchmarks/quality.py --data FOLDER [--bytes 60000] [--plot FILE] [--json FILE]

The text is of files that the bundled model has not seen: those that its manifest holds out, as far
as the folder (the standard library of Python 3.11) has them with the same contents. The engine
reads it in pieces of 256 tokens, on whatever this machine has.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from jaxllm import LLM, bundled
from jaxllm.bench.loss import measure_loss
from jaxllm.bench.svg import Chart, Line, draw

VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "weights int8": {"quantization": "int8"},
    "weights fp8": {"quantization": "fp8"},
    "weights int4": {"quantization": "int4"},
    "KV fp8, scales of 1.0": {"kv_cache_dtype": "fp8"},
    "KV fp8, calculated": {"kv_cache_dtype": "fp8", "calculate_kv_scales": True},
    "KV int8, calculated": {"kv_cache_dtype": "int8"},
    "weights int8, KV fp8": {"quantization": "int8", "kv_cache_dtype": "fp8"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--bytes", type=int, default=60_000)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text, num_files = heldout(args.data, args.bytes)
    losses = {}
    for name, options in VARIANTS.items():
        llm = LLM("bundled", dtype="bfloat16", enforce_eager=True, max_num_seqs=8, **options)
        try:
            losses[name] = measure_loss(llm, text)
        finally:
            llm.shutdown()
    plain = losses["bfloat16"].bits_per_byte
    num_tokens = losses["bfloat16"].num_tokens
    print(f"{len(text.encode())} bytes of {num_files} files, {num_tokens} tokens")
    print("| | bits per byte | more |\n|---|---|---|")
    for name, loss in losses.items():
        more = loss.bits_per_byte / plain - 1
        print(f"| {name} | {loss.bits_per_byte:.4f} | {more:+.2%} |")
    if args.json is not None:
        figures = {name: loss.bits_per_byte for name, loss in losses.items()}
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        places = [float(index) for index in range(len(losses))]
        line = Line("bits per byte", places, [its.bits_per_byte for its in losses.values()])
        labels = "; ".join(f"{i} {name}" for i, name in enumerate(losses))
        args.plot.write_text(draw([Chart("Unseen text", labels, "bits per byte", [line])], 1))


def heldout(folder: Path, num_bytes: int) -> tuple[str, int]:
    """Unseen text of about so many bytes, and the number of its files."""
    model = bundled.path("bundled")
    assert model is not None
    lines = (model / "manifest.jsonl").read_text().splitlines()
    entries = [its for its in map(json.loads, lines) if its["split"] != "train"]
    found: list[str] = []
    for entry in entries:
        file = folder.resolve().parent / entry["name"]
        if not file.is_file() or sum(map(len, found)) >= num_bytes:
            continue
        data = file.read_bytes()
        if hashlib.sha256(data).hexdigest() == entry["sha256"]:
            found.append(data.decode())
    if not found:
        raise SystemExit(f"{folder} has none of the {len(entries)} files that are held out")
    return "".join(found)[:num_bytes], len(found)


if __name__ == "__main__":
    main()
