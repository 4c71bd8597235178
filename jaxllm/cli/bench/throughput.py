"""`jaxllm bench throughput`: the throughput of an engine in this process."""

import argparse
from pathlib import Path

from jaxllm.bench.options import DatasetOptions
from jaxllm.cli.arguments import (
    add_engine_arguments,
    add_option_arguments,
    engine_options_from,
    integer,
    options_from,
)
from jaxllm.config import EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--n", type=integer, default=1, metavar="N", help="Answers per prompt. Default: 1."
    )
    parser.add_argument(
        "--async-engine",
        action="store_true",
        help="Through AsyncLLMEngine, whose engine is in a process of its own.",
    )
    parser.add_argument("--output-json", metavar="FILE", help="Where to write the result as JSON.")
    # The engine's --seed also seeds the prompts.
    add_option_arguments(parser, DatasetOptions, without=("seed",))
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> None:
    config = EngineConfig.create(**engine_options_from(args))
    data = DatasetOptions(**options_from(args, DatasetOptions))
    data.validate()
    from jaxllm.bench.report import write_json
    from jaxllm.bench.throughput import bench_throughput

    result = bench_throughput(config, data, n=args.n, use_async_engine=args.async_engine)
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s\n"
        f"Prompt tokens: {result['total_prompt_tokens']:,}\n"
        f"Output tokens: {result['total_output_tokens']:,}\n"
        f"Seconds: {result['elapsed_time']:.2f}"
    )
    if args.output_json is not None:
        write_json(Path(args.output_json), result)
