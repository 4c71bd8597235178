"""`jaxllm bench latency`: the time that an engine in this process takes for a batch."""

import argparse
from pathlib import Path

from jaxllm.bench.latency import LatencyOptions, bench_latency
from jaxllm.cli.arguments import (
    add_engine_arguments,
    add_option_arguments,
    engine_options_from,
    options_from,
)
from jaxllm.config import EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-json", metavar="FILE", help="Where to write the result as JSON.")
    add_option_arguments(parser, LatencyOptions)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> None:
    # All runs have the same prompts. With a prefix cache only the first run would compute them.
    engine = engine_options_from(args)
    engine.setdefault("enable_prefix_caching", False)
    options = LatencyOptions(**options_from(args, LatencyOptions))
    result = bench_latency(EngineConfig.create(**engine), options)
    print(f"Mean latency: {result['avg_latency']:.4f} s")
    for percentile, seconds in result["percentiles"].items():
        print(f"{percentile}% percentile: {seconds:.4f} s")
    if args.output_json is not None:
        from jaxllm.bench.report import write_json

        write_json(Path(args.output_json), result)
