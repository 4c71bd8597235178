"""`jaxllm warmup`: compiles an engine's programs now, so that its next start loads them."""

import argparse
import dataclasses
import json

from jaxllm.cli.arguments import add_engine_arguments, engine_options_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print JSON, for programs.")
    # Add all flags, so that the flags of an engine can be reused unchanged.
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from jaxllm.config import EngineConfig
    from jaxllm.programs.warmup import warm_up

    report = warm_up(EngineConfig.create(**engine_options_from(args)))
    print(json.dumps(dataclasses.asdict(report), indent=1) if args.json else report)
