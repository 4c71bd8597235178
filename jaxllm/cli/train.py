"""`jaxllm train`: trains a small model on text, optionally with a teacher."""

import argparse

from jaxllm.cli.arguments import add_option_arguments, options_from
from jaxllm.errors import ValidationError
from jaxllm.training.options import PARTS, TrainOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "output",
        metavar="DIR",
        help="Folder of the run. If there is one, it goes on; what is not given is as it was.",
    )
    parser.add_argument(
        "--export-only",
        action="store_true",
        help="Train no further: write DIR/model from the latest checkpoint.",
    )
    for part in PARTS.values():
        add_option_arguments(parser, part)


def run(args: argparse.Namespace) -> None:
    given = {name: options_from(args, part) for name, part in PARTS.items()}
    options = TrainOptions.of_folder(args.output, given)
    options.validate()
    try:
        from jaxllm.runner.jax_setup import leave_out_absent_tpu
        from jaxllm.training.trainer import Trainer
    except ModuleNotFoundError as error:
        raise ValidationError(
            f"training needs {error.name}; install it with pip install 'jaxllm[train]'"
        ) from None
    leave_out_absent_tpu()
    trainer = Trainer(options)
    folder = trainer.export_latest() if args.export_only else trainer.run()
    base = options.adapter.lora
    what = folder if base is None else f"{base} --lora {folder}"
    print(f"{folder}: to try it, jaxllm generate {what} --prompt TEXT")
