"""`jaxllm measure-steps`: times an engine's programs on this machine, for `jaxllm simulate`."""

import argparse
import sys
from pathlib import Path

from jaxllm.cli.arguments import add_engine_arguments, engine_options_from
from jaxllm.errors import refused


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="The JSON file.")
    parser.add_argument("--repetitions", type=int, default=3, help="Of every batch. Default: 3.")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> None:
    if args.repetitions < 1:
        raise refused("repetitions", args.repetitions, "it must be at least 1")
    options = engine_options_from(args)
    # Create the directory before measuring, so that the result cannot be lost.
    args.out.parent.mkdir(parents=True, exist_ok=True)

    import msgspec

    from jaxllm.config import EngineConfig
    from jaxllm.simulation.measure import measure_steps

    def show(what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)

    measurement = measure_steps(
        EngineConfig.create(**options), repetitions=args.repetitions, on_batch=show
    )
    show("")
    args.out.write_bytes(msgspec.json.format(msgspec.json.encode(measurement), indent=1) + b"\n")
    print(f"{'program':<16}{'steps':>7}{'least':>12}{'per 1000 attended tokens':>28}")
    for entry in measurement.lines:
        line = entry.line
        print(
            f"{entry.bucket!s:<16}{entry.num_steps:>7}{1e3 * line.base_s:>9.2f} ms"
            f"{1e6 * line.per_attended_s:>25.4f} ms"
        )
