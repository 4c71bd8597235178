"""Offline throughput: the same prompts through jaxllm and its peers, alternating in one run.

    python benchmarks/offline.py
    python benchmarks/offline.py --model DIR --scenarios s1,s16 --dtype float32
    python benchmarks/offline.py --peers transformers,vllm --vllm-python venv-vllm/bin/python

Each engine has its own process. They alternate, repetition by repetition, while the others are
idle; compare the ratios. Prompts are random token ids, new ones in each repetition, so prefix
caches do not help. Decoding is greedy and ignores the end of sequence. Without --model, a Llama of
0.35 billion random parameters is made in a temporary folder, or, with --shape experts, a Qwen3-MoE
of 1.0 billion, of whose experts a token uses an eighth, or, with --shape recurrent, a Qwen3.5 of
0.43 billion.

A scenario 512x1000x1000 is the number of requests, tokens of a prompt and tokens of an answer; all
requests start at once. With the device's --ceilings, the output has the share of the serial model
(see floors.py).
"""

import argparse
import json
import random
from pathlib import Path

import floors
import side_by_side
from side_by_side import SHAPES, Request, Worker


def workload(scenario: str, seed: int, vocab_size: int) -> list[Request]:
    """s1: one request; s16: sixteen equal ones; mix: 64 of many lengths."""
    rng = random.Random(f"{scenario}-{seed}")

    def prompt(length: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(length)]

    if scenario == "mix":
        return [(prompt(rng.randint(32, 512)), rng.randint(16, 128)) for _ in range(64)]
    count, prompt_len, output_len = equal_requests(scenario)
    return [(prompt(prompt_len), output_len) for _ in range(count)]


def equal_requests(scenario: str) -> list[int]:
    """The number of requests, and the tokens of their prompts and answers."""
    named = {"s1": "1x128x64", "s16": "16x128x64"}
    return [int(number) for number in named.get(scenario, scenario).split("x")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    side_by_side.add_arguments(parser)
    floors.add_argument(parser)
    parser.add_argument("--scenarios", default="s1,s16,mix")
    side_by_side.add_shape_argument(parser)
    args = parser.parse_args()
    family, shape = SHAPES[args.shape]
    with side_by_side.checkpoint(args.model, args.dtype, family, **shape) as model:
        config = json.loads((Path(model) / "config.json").read_text())
        with side_by_side.workers(args, model) as workers:
            rows = [
                row
                for scenario in args.scenarios.split(",")
                for row in measure(scenario, args, config, workers)
            ]
    side_by_side.record("offline", rows, args)


def measure(
    scenario: str, args: argparse.Namespace, config: dict, workers: dict[str, Worker]
) -> list[dict]:
    """Measure a row for each engine, and print them."""
    vocab_size = config["vocab_size"]
    for worker in workers.values():
        # Warm up with other prompts of the same lengths.
        worker.run([(p, min(n, 4)) for p, n in workload(scenario, 0, vocab_size)])
    results: dict[str, list[dict[str, float]]] = {engine: [] for engine in workers}
    for seed in range(1, args.repetitions + 1):
        requests = workload(scenario, seed, vocab_size)
        for engine, worker in workers.items():
            figures = worker.run(requests)
            figures["tokens_per_s"] = sum(n for _, n in requests) / figures["seconds"]
            results[engine].append(figures)
    rows: list[dict] = []
    for engine, figures in results.items():
        row: dict = side_by_side.medians(figures)
        row["version"] = workers[engine].version
        if args.ceilings and scenario != "mix":
            row["share"] = serial_model_s(scenario, args, config) / row["seconds"]
        row["start_up_s"] = workers[engine].start_up_s
        rows.append({"scenario": scenario, "engine": engine, **row})
        ratio = rows[0]["tokens_per_s"] / row["tokens_per_s"]
        print(
            f"{scenario:4} {engine:13} {row['tokens_per_s']:8.1f} tok/s   "
            f"first token {row['first_token_s']:6.2f} s   peak {row['peak_mib']:6.0f} MiB   "
            f"start-up {row['start_up_s']:5.1f} s"
            + (f"   share of serial model {row['share']:.2f}" if "share" in row else "")
            + (f"   jaxllm/{engine} {ratio:.2f}x" if len(rows) > 1 else "")
            + (f", CPU time {row['cpu_s'] / rows[0]['cpu_s']:.3f}" if len(rows) > 1 else ""),
            flush=True,
        )
    return rows


def serial_model_s(scenario: str, args: argparse.Namespace, config: dict) -> float:
    """Seconds for all requests by the serial model, in full batches."""
    count, prompt_len, output_len = equal_requests(scenario)
    line = floors.of_llama(config, args.dtype, args.ceilings)
    batch = min(count, args.max_num_seqs)
    return count / batch * floors.serial_s(line, batch, prompt_len, output_len)


if __name__ == "__main__":
    main()
