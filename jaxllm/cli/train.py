"""`jaxllm train`: text in, a small model out, or one that learns from another."""

import argparse
import typing

from jaxllm.cli.arguments import add_option_arguments, options_from
from jaxllm.errors import ValidationError
from jaxllm.training.options import TrainOptions

PARTS = {
    name: hint for name, hint in typing.get_type_hints(TrainOptions).items() if hint is not str
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "output", metavar="DIR", help="Folder of the run. If it has one, the run goes on."
    )
    parser.add_argument(
        "--export-only",
        action="store_true",
        help="Train no further: write DIR/model from the latest checkpoint.",
    )
    for part in PARTS.values():
        add_option_arguments(parser, part)


def run(args: argparse.Namespace) -> None:
    options = TrainOptions(
        output=args.output,
        **{name: part(**options_from(args, part)) for name, part in PARTS.items()},
    )
    if not args.export_only:
        options.validate()
    try:
        from jaxllm.training.trainer import Trainer
    except ModuleNotFoundError as error:
        raise ValidationError(
            f"training needs {error.name}; install it with: pip install 'jaxllm[train]'"
        ) from None
    trainer = Trainer(options)
    folder = trainer.export_latest() if args.export_only else trainer.run()
    print(f"{folder}: to try it, jaxllm generate {folder} --prompt TEXT")
