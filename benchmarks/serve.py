"""Serving over HTTP: the same load on jaxllm and its peers, alternating in one run.

    python benchmarks/serve.py
    python benchmarks/serve.py --vllm-python venv-vllm/bin/python
    python benchmarks/serve.py --llama-server PATH --gguf model.gguf --model DIR

The servers run at the same time and alternate: each load goes to one after the other, while the
rest are idle. The load and the metrics are those of `jaxllm bench serve`: first all requests at
once, and then at a rate. Without --model, a Llama of 0.35 billion random parameters is made in a
temporary folder.
"""

import argparse
import contextlib
import os
from collections.abc import Iterator

import servers
import side_by_side
from side_by_side import SHAPE_350M

from jaxllm.bench.options import DatasetOptions, LoadOptions, ReportOptions
from jaxllm.bench.serve import bench_serve

SHOWN = {
    "output_throughput": "tok/s",
    "mean_ttft_ms": "ms to first",
    "mean_tpot_ms": "ms per token",
    "p99_itl_ms": "ms p99 between",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    side_by_side.add_arguments(parser)
    parser.add_argument("--llama-server", metavar="PATH", help="the program of llama.cpp")
    parser.add_argument("--gguf", metavar="FILE", help="the same model for it")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--request-rates", default="inf,0.5", help="requests per second")
    parser.set_defaults(peers="")
    args = parser.parse_args()
    rows = []
    with (
        side_by_side.checkpoint(args.model, args.dtype, **SHAPE_350M) as model,
        contextlib.ExitStack() as stack,
    ):
        running = [stack.enter_context(one) for one in all_servers(args, model)]
        for rate in args.request_rates.split(","):
            rows += measure(args, model, float(rate), running)
    side_by_side.record("serve", rows, args)


def all_servers(
    args: argparse.Namespace, model: str
) -> Iterator[contextlib.AbstractContextManager[servers.Server]]:
    """jaxllm's server, and one of each peer whose program is given."""
    options = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in side_by_side.engine_options(args).items()
    ]
    yield servers.jaxllm(model, *options, "--no-access-log")
    if args.vllm_python:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # The default leaves a core idle.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
        module = "vllm.entrypoints.openai.api_server"
        command = [args.vllm_python, "-m", module, "--model", model]
        yield servers.started("vllm", [*command, *options])
    if args.llama_server:
        if args.gguf is None:
            raise SystemExit("--llama-server needs --gguf")
        num_seqs = args.max_num_seqs
        context = ["-c", str(args.max_model_len * num_seqs), "-np", str(num_seqs)]
        yield servers.started("llama.cpp", [args.llama_server, "-m", args.gguf, *context])


def measure(
    args: argparse.Namespace, model: str, rate: float, running: list[servers.Server]
) -> list[dict]:
    """Measure a row for each server, and print them."""
    results: dict[str, list[dict[str, float]]] = {server.name: [] for server in running}
    for seed in range(args.repetitions + 1):
        for server in running:
            data = DatasetOptions(
                num_prompts=args.num_prompts,
                input_len=args.input_len,
                output_len=args.output_len,
                seed=seed,  # new prompts, so that no prefix cache helps
            )
            load = LoadOptions(
                port=server.port, tokenizer=model, request_rate=rate, ignore_eos=True
            )
            result = bench_serve(data, load, ReportOptions()).result
            if result["failed"]:
                raise SystemExit(f"{server.name}: {result['error_counts']}")
            if seed:  # skip the first run, which warms up
                results[server.name].append({name: result[name] for name in SHOWN})
    rows = []
    for server in running:
        row = side_by_side.medians(results[server.name])
        rows.append({"rate": str(rate), "engine": server.name, **row})
        figures = "   ".join(f"{row[name]:8.1f} {unit}" for name, unit in SHOWN.items())
        ratio = rows[0]["output_throughput"] / row["output_throughput"]
        print(
            f"rate {rate:4} {server.name:10} {figures}   start-up {server.start_up_s:5.1f} s"
            + (f"   jaxllm/{server.name} {ratio:.2f}x" if len(rows) > 1 else ""),
            flush=True,
        )
    return rows


if __name__ == "__main__":
    main()
