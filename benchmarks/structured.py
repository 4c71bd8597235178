"""What grammars cost: tokens per second with a JSON schema in every row, and with none.

One engine answers the same number of requests with and without a schema, by turns, and with equally
many tokens: the answers of the schema do not end before max_tokens. With `--beside`, the engine of
another source tree answers those without a schema, too. If that tree has no grammars, this shows
what they cost the steps that have none.

    python benchmarks/structured.py --beside ../main
    python benchmarks/structured.py --vocab-size 151936     # random weights of two layers
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Four fields, as often as there is room for.
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "kind": {"enum": ["function", "class", "module"]},
            "line": {"type": "integer"},
            "is_public": {"type": "boolean"},
        },
        "required": ["name", "kind", "line", "is_public"],
        "additionalProperties": False,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--vocab-size", type=int, help="take a tiny model with so many logits")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--beside", type=Path, help="another source tree")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)
    with tempfile.TemporaryDirectory() as directory:
        if args.vocab_size:
            args.model = make_model(directory, args.vocab_size)
        trees = {"here": ROOT} | ({"beside": args.beside.resolve()} if args.beside else {})
        workers = {name: Worker(tree, args) for name, tree in trees.items()}
        loads = [("here", "plain"), ("here", "schema")]
        loads += [("beside", "plain")] if args.beside else []
        times: dict[tuple[str, str], list[dict[str, float]]] = {load: [] for load in loads}
        for _ in range(args.rounds):
            for name, kind in loads:
                times[name, kind].append(workers[name].run(kind))
        for worker in workers.values():
            worker.close()
    plain = times["here", "plain"]
    for (name, kind), its in times.items():
        line = {"tree": name, "load": kind, "rows": args.rows}
        line["tokens_per_s"] = round(statistics.median(x["tokens"] / x["s"] for x in its), 1)
        # Of pairs that ran one after the other, since machines become slower and faster.
        for unit in ("s", "cpu_s"):
            ratio = statistics.median(a[unit] / b[unit] for a, b in zip(plain, its, strict=True))
            line[f"plain_here_over_this_{unit}"] = round(ratio, 3)
        line |= {key: its[-1][key] for key in ("steps", "mask_us_per_step", "wait_us_per_step")}
        print(json.dumps(line))


def make_model(directory: str, vocab_size: int) -> str:
    from jaxllm.testing import make_tiny_checkpoint

    return str(make_tiny_checkpoint(directory, vocab_size=vocab_size))


class Worker:
    """An engine in its own process, idle while another one runs."""

    def __init__(self, tree: Path, args: argparse.Namespace):
        command = [sys.executable, __file__, "--worker", f"--model={args.model}"]
        command += [f"--rows={args.rows}", f"--max-tokens={args.max_tokens}"]
        path = os.pathsep.join([str(tree), str(tree / "kernels")])
        self._process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": path},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.run("plain")  # the first run is warm-up

    def run(self, kind: str) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(kind, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError("the engine has ended")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def work(args: argparse.Namespace) -> None:
    from jaxllm.config import EngineConfig
    from jaxllm.engine.core import EngineCore
    from jaxllm.executor.launch import make_executors
    from jaxllm.messages import EngineRequest
    from jaxllm.sampling_params import SamplingParams

    config = EngineConfig.create(
        model=args.model,
        max_num_seqs=args.rows,
        max_model_len=16 + args.max_tokens,
        enable_prefix_caching=False,
    )
    [executor] = make_executors(config)
    core = EngineCore(config, executor)
    params = SamplingParams(temperature=1.0, max_tokens=args.max_tokens, ignore_eos=True)

    def run(kind: str) -> dict[str, float]:
        its: dict[str, Any] = {"grammar": grammar()} if kind == "schema" else {}
        for i in range(args.rows):
            core.add_request(
                EngineRequest(
                    request_id=str(i),
                    prompt_token_ids=[3 + (i * 131 + j * 7) % 300 for j in range(16)],
                    sampling_params=params,
                    max_tokens=args.max_tokens,
                    seed=i,
                    **its,
                )
            )
        before, num_tokens = core.stats(), 0
        start, cpu = time.perf_counter(), time.process_time()
        while core.has_work():
            for output in core.step():
                assert output.error is None, output.error
                num_tokens += len(output.new_token_ids)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        stats = core.stats()
        steps = stats.num_steps - before.num_steps
        masks = getattr(stats, "mask_s", 0.0) - getattr(before, "mask_s", 0.0)
        waits = stats.device_wait_s - before.device_wait_s
        return {
            "tokens": num_tokens,
            "s": seconds,
            "cpu_s": cpu,
            "steps": steps,
            "mask_us_per_step": round(masks / steps * 1e6),
            "wait_us_per_step": round(waits / steps * 1e6),
        }

    for line in sys.stdin:
        if line.strip() == "schema":
            run("schema")  # compiles the grammar, and takes no part
        print(json.dumps(run(line.strip())), flush=True)


def grammar() -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(
        json.dumps(SCHEMA), overrides={"whitespace_flexible": False}
    )


if __name__ == "__main__":
    main()
