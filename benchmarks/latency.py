"""Latency by batch and context: the time to the first token, and from token to token after it.

    python benchmarks/latency.py
    python benchmarks/latency.py --batches 1,8 --contexts 64,512 --peers ''

All requests of a batch begin together and have prompts of the same length; the first token of a
batch waits for all its prompts. The engines take turns, as in offline.py. Beside milliseconds per
token stands the share of the floor: the time in which all cores read the weights of a step once,
measured in the same run with plain reads, over the time that the step took.
"""

import argparse
import json
import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import side_by_side
from side_by_side import SHAPE_350M, Request, Worker

OUTPUT_LEN = 33  # 32 steps after the first token


def batch(size: int, context: int, seed: int, vocab_size: int) -> list[Request]:
    rng = random.Random(f"{size}-{context}-{seed}")
    return [([rng.randrange(vocab_size) for _ in range(context)], OUTPUT_LEN) for _ in range(size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    side_by_side.add_arguments(parser)
    parser.add_argument("--batches", default="1,4,16", help="requests at once")
    parser.add_argument("--contexts", default="128,512", help="tokens of each prompt")
    args = parser.parse_args()
    contexts = [int(text) for text in args.contexts.split(",")]
    rows = []
    with side_by_side.checkpoint(args.model, args.dtype, **SHAPE_350M) as model:
        config = json.loads((Path(model) / "config.json").read_text())
        vocab_size = config["vocab_size"]
        weights = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
        if not config["tie_word_embeddings"]:
            # Of the embedding a step reads a few rows.
            item_size = 2 if args.dtype == "bfloat16" else 4
            weights -= vocab_size * config["hidden_size"] * item_size
        with side_by_side.workers(args, model, max(contexts) + OUTPUT_LEN) as workers:
            for size in map(int, args.batches.split(",")):
                for context in contexts:
                    rows += measure(size, context, args.repetitions, vocab_size, weights, workers)
    side_by_side.record("latency", rows, args.out)


def measure(
    size: int,
    context: int,
    repetitions: int,
    vocab_size: int,
    weight_bytes: int,
    workers: dict[str, Worker],
) -> list[dict]:
    """A row for each engine; prints them."""
    for worker in workers.values():
        worker.run(batch(size, context, 0, vocab_size))
    results: dict[str, list[dict[str, float]]] = {engine: [] for engine in workers}
    bandwidths = []
    for seed in range(1, repetitions + 1):
        requests = batch(size, context, seed, vocab_size)
        bandwidths.append(read_bandwidth())
        for engine, worker in workers.items():
            run = worker.run(requests)
            decode = run["seconds"] - run["first_token_s"]
            results[engine].append(
                {
                    "first_token_ms": run["first_token_s"] * 1e3,
                    "per_token_ms": decode / (OUTPUT_LEN - 1) * 1e3,
                }
            )
    floor_ms = weight_bytes / statistics.median(bandwidths) * 1e3
    rows = []
    for engine, figures in results.items():
        row = side_by_side.medians(figures) | {"floor_ms": floor_ms}
        rows.append({"batch": size, "context": context, "engine": engine, **row})
        ratios = [row[name] / rows[0][name] for name in ("first_token_ms", "per_token_ms")]
        print(
            f"batch {size:3} context {context:5} {engine:13} first token "
            f"{row['first_token_ms']:8.1f} ms   per token {row['per_token_ms']:7.2f} ms   "
            f"share of floor {floor_ms / row['per_token_ms']:4.2f}"
            + (f"   {engine}/jaxllm {ratios[0]:.2f}x {ratios[1]:.2f}x" if len(rows) > 1 else ""),
            flush=True,
        )
    return rows


def read_bandwidth(size: int = 1 << 29) -> float:
    """Bytes per second that all cores read; a sum of integers waits for memory."""
    num_cores = os.cpu_count() or 1
    parts = np.array_split(np.ones(size // 8, np.int64), num_cores)
    with ThreadPoolExecutor(num_cores) as pool:
        list(pool.map(np.sum, parts))
        start = time.perf_counter()
        list(pool.map(np.sum, parts))
        return size / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
