"""Offline throughput: the same prompts through jaxllm and a peer, side by side in one run.

    python benchmarks/offline.py
    python benchmarks/offline.py --model DIR --scenarios s1,s16 --dtype float32

Each engine lives in a process of its own and they take turns, repetition by repetition, while the
other one is idle; the figures to read are the ratios. Prompts are random token ids, new ones in
each repetition (nothing is found in a cache); decoding is greedy and runs past the end of sequence.
Without --model, a Llama of 0.35 billion random parameters is made in a temporary folder.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHAPE_350M: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
PEER_BATCH = 16  # transformers' generate: static batches of this size

Request = tuple[list[int], int]  # prompt, number of tokens to generate


def workload(scenario: str, seed: int, vocab_size: int) -> list[Request]:
    """s1: one request; s16: sixteen equal ones; mix: 64 of many lengths."""
    rng = random.Random(f"{scenario}-{seed}")

    def prompt(length: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(length)]

    if scenario == "mix":
        return [(prompt(rng.randint(32, 512)), rng.randint(16, 128)) for _ in range(64)]
    return [(prompt(128), 64) for _ in range({"s1": 1, "s16": 16}[scenario])]


def run_jaxllm(model: str, dtype: str) -> Any:
    from jaxllm import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, max_model_len=1024, max_num_seqs=64, skip_tokenizer_init=True)

    def run(requests: list[Request]) -> list[float]:
        outputs = llm.generate(
            [prompt for prompt, _ in requests],
            [
                SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
                for _, n in requests
            ],
            use_tqdm=False,
        )
        for output, (_, wanted) in zip(outputs, requests, strict=True):
            assert len(output.outputs[0].token_ids) == wanted, output
        return [output.metrics.first_token_latency for output in outputs if output.metrics]

    return run


def run_transformers(model: str, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    torch.set_num_threads(os.cpu_count() or 1)
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    hf.generation_config.eos_token_id = None

    class FirstToken(StoppingCriteria):
        at: float | None = None

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            self.at = self.at or time.perf_counter()
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    @torch.inference_mode()
    def run(requests: list[Request]) -> list[float]:
        """Static batches, left-padded, of requests with similar output lengths; tokens that a
        request did not ask for are not counted."""
        start, first_tokens = time.perf_counter(), []
        ordered = sorted(requests, key=lambda request: (request[1], len(request[0])))
        for i in range(0, len(ordered), PEER_BATCH):
            batch = ordered[i : i + PEER_BATCH]
            longest = max(len(prompt) for prompt, _ in batch)
            steps = max(n for _, n in batch)
            first = FirstToken()
            hf.generate(
                torch.tensor([[0] * (longest - len(p)) + p for p, _ in batch]),
                attention_mask=torch.tensor(
                    [[0] * (longest - len(p)) + [1] * len(p) for p, _ in batch]
                ),
                max_new_tokens=steps,
                min_new_tokens=steps,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([first]),
            )
            assert first.at is not None
            first_tokens += [first.at - start] * len(batch)
        return first_tokens

    return run


ENGINES = {"jaxllm": run_jaxllm, "transformers": run_transformers}


def serve(engine: str, model: str, dtype: str) -> None:
    """A worker: reads a list of requests per line, runs it, answers with a line of figures."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to stderr
    run = ENGINES[engine](model, dtype)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        requests = json.loads(line)
        start = time.perf_counter()
        first_tokens = run(requests)
        figures = {
            "seconds": time.perf_counter() - start,
            "first_token_s": statistics.mean(first_tokens),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        print(json.dumps(figures), file=answers, flush=True)


class Worker:
    """An engine in a process of its own."""

    def __init__(self, engine: str, model: str, dtype: str):
        start = time.perf_counter()
        command = [sys.executable, __file__, "--worker", engine, "--model", model, "--dtype", dtype]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()
        self.start_up_s = time.perf_counter() - start

    def run(self, requests: list[Request]) -> dict[str, float]:
        assert self._process.stdin is not None
        print(json.dumps(requests), file=self._process.stdin, flush=True)
        return json.loads(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with exit code {self._process.wait()}")
        return line


@contextlib.contextmanager
def checkpoint(model: str | None, dtype: str) -> Iterator[str]:
    if model is not None:
        yield model
        return
    from jaxllm.testing import make_tiny_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        print("making a checkpoint of random weights ...", file=sys.stderr)
        yield str(make_tiny_checkpoint(Path(folder) / "350m", "llama", dtype=dtype, **SHAPE_350M))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint (default: 0.35 billion random parameters)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--scenarios", default="s1,s16,mix")
    parser.add_argument("--peers", default="transformers", help="comma-separated; '' for none")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=sorted(ENGINES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args.worker, args.model, args.dtype)
        return
    engines = ["jaxllm", *filter(None, args.peers.split(","))]
    with checkpoint(args.model, args.dtype) as model:
        vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        workers = {engine: Worker(engine, model, args.dtype) for engine in engines}
        for scenario in args.scenarios.split(","):
            report(args, scenario, vocab_size, workers)


def report(
    args: argparse.Namespace, scenario: str, vocab_size: int, workers: dict[str, Worker]
) -> None:
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
    summary = {
        engine: {name: statistics.median(r[name] for r in rows) for name in rows[0]}
        | {"start_up_s": workers[engine].start_up_s}
        for engine, rows in results.items()
    }
    if args.json:
        print(json.dumps({"scenario": scenario, "dtype": args.dtype, "engines": summary}))
        return
    for engine, row in summary.items():
        ratio = summary["jaxllm"]["tokens_per_s"] / row["tokens_per_s"]
        print(
            f"{scenario:4} {args.dtype:8} {engine:13} {row['tokens_per_s']:8.1f} tok/s   "
            f"first token {row['first_token_s']:6.2f} s   peak {row['peak_mib']:6.0f} MiB   "
            f"start-up {row['start_up_s']:5.1f} s"
            + (f"   jaxllm/{engine} {ratio:.2f}x" if engine != "jaxllm" else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
