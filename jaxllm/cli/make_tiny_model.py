"""`jaxllm make-tiny-model`: writes a model to try the commands with, without a download."""

import argparse
from pathlib import Path

from jaxllm.cli.arguments import integer
from jaxllm.errors import ValidationError
from jaxllm.models.registry import family_names
from jaxllm.testing import make_tiny_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="Where to write it; made if needed.")
    parser.add_argument(
        "--family",
        choices=family_names(),
        default="llama",
        help="Architecture. Default: llama.",
    )
    parser.add_argument(
        "--seed", type=integer, default=0, metavar="N", help="Seed of the weights. Default: 0."
    )


def run(args: argparse.Namespace) -> None:
    directory = Path(args.directory)
    if directory.exists() and any(directory.iterdir()):
        raise ValidationError(f"{directory} is not empty; give a new directory, or remove it")
    make_tiny_checkpoint(directory, args.family, seed=args.seed)
    print(f"{directory}: a {args.family} model with random weights, whose text is noise")
