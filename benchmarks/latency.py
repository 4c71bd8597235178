"""Latency by batch and context: time to the first token, and time per output token.

    python benchmarks/latency.py
    python benchmarks/latency.py --batches 1,8 --contexts 64,512 --peers ''

All requests of a batch begin together and have prompts of the same length. The time per token is of
steps in which all of them decode, with contexts around the given one. The engines alternate, as in
offline.py. The output also has the share of the floor (see floors.py). With --ceilings the floor is
the device's. Otherwise it is the time in which all cores read the weights and caches of a step
once, measured in the same run with plain reads. A floor is that of a dense model, so models of
another --shape have no share.
"""

import argparse
import functools
import json
import math
import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import floors
import numpy as np
import side_by_side
from side_by_side import SHAPES, Request, Worker


def batch(size: int, context: int, output_len: int, seed: int, vocab_size: int) -> list[Request]:
    rng = random.Random(f"{size}-{context}-{seed}")
    prompt_len = max(1, context - output_len // 2)
    return [
        ([rng.randrange(vocab_size) for _ in range(prompt_len)], output_len) for _ in range(size)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    side_by_side.add_arguments(parser)
    floors.add_argument(parser)
    parser.add_argument("--batches", default="1,4,16", help="requests at once")
    parser.add_argument("--contexts", default="128,512", help="tokens that a request attends to")
    parser.add_argument(
        "--output-len", type=int, default=33, help="tokens of an answer; 1: only the first is timed"
    )
    side_by_side.add_shape_argument(parser)
    args = parser.parse_args()
    family, shape = SHAPES[args.shape]
    with side_by_side.checkpoint(args.model, args.dtype, family, **shape) as model:
        config = json.loads((Path(model) / "config.json").read_text())
        with side_by_side.workers(args, model) as workers:
            rows = [
                row
                for size in side_by_side.numbers(args.batches)
                for context in side_by_side.numbers(args.contexts)
                for row in measure(size, context, args, config, workers)
            ]
    side_by_side.record("latency", rows, args)


def measure(
    size: int,
    context: int,
    args: argparse.Namespace,
    config: dict,
    workers: dict[str, Worker],
) -> list[dict]:
    """Measure a row for each engine, and print them."""

    def requests(seed: int) -> list[Request]:
        return batch(size, context, args.output_len, seed, config["vocab_size"])

    for worker in workers.values():
        worker.decode(requests(0))
    results: dict[str, list[dict[str, float]]] = {engine: [] for engine in workers}
    bandwidths = []
    for seed in range(1, args.repetitions + 1):
        if args.ceilings is None:
            bandwidths.append(read_bandwidth())
        for engine, worker in workers.items():
            results[engine].append(worker.decode(requests(seed)))
    rates = args.ceilings or (statistics.median(bandwidths), math.inf)
    rows: list[dict] = []
    for engine, figures in results.items():
        worker = workers[engine]
        row = {name[:-2] + "_ms": s * 1e3 for name, s in side_by_side.medians(figures).items()}
        what = "first_token_ms" if args.output_len == 1 else "per_token_ms"
        if args.shape == "dense":
            row["floor_ms"] = floor_ms(size, context, args, config, rates)
            row["share"] = row["floor_ms"] / row[what]
        about = {"engine": engine, "version": worker.version, "start_up_s": worker.start_up_s}
        rows.append({"batch": size, "context": context, **about, **row})
        print(
            f"batch {size:3} context {context:5} {engine:13} first token "
            f"{row['first_token_ms']:8.1f} ms   "
            + (f"per token {row[what]:7.2f} ms   " if what == "per_token_ms" else "")
            + (f"share of floor {row['share']:4.2f}" if "share" in row else "")
            + (f"   {engine}/jaxllm {row[what] / rows[0][what]:.2f}x" if len(rows) > 1 else ""),
            flush=True,
        )
    return rows


def floor_ms(
    size: int, context: int, args: argparse.Namespace, config: dict, rates: tuple[float, float]
) -> float:
    """The least time of a token of each request, or of the first ones if there are no others."""
    line = floors.of_llama(config, args.dtype, rates)
    if args.output_len == 1:
        return 1e3 * size * floors.prefill_s(line, context)
    return 1e3 * floors.decode_s(line, size, context)


def read_bandwidth() -> float:
    """Measure the bytes per second that all cores read; a sum of integers is bound by memory."""
    data = _much_data()
    num_cores = os.cpu_count() or 1
    parts = np.array_split(data, num_cores)
    with ThreadPoolExecutor(num_cores) as pool:
        list(pool.map(np.sum, parts))
        start = time.perf_counter()
        list(pool.map(np.sum, parts))
        return data.nbytes / (time.perf_counter() - start)


@functools.cache
def _much_data() -> np.ndarray:
    """Allocated once: some seconds after so much memory is freed, a kernel returns it to its host,
    which would take a core away from the engine that runs then."""
    return np.ones(1 << 26, np.int64)


if __name__ == "__main__":
    main()
