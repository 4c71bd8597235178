"""`jaxllm complete`: continues prompts from the terminal with a model behind a server."""

import argparse
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxllm.cli.arguments import (
    TEXT_ONLY,
    add_sampling_arguments,
    add_server_arguments,
    integer,
    sampling_params_from,
)
from jaxllm.cli.conversation import answer, converse
from jaxllm.errors import ValidationError
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.cli.remote_model import RemoteModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-q", "--quick", metavar="PROMPT", help="Complete this, print it, and leave."
    )
    add_server_arguments(parser, url="http://localhost:8000/v1")
    parser.add_argument(
        "--seed", type=integer, default=argparse.SUPPRESS, metavar="N", help="Seed of each answer."
    )
    add_sampling_arguments(parser, without=TEXT_ONLY)


def run(args: argparse.Namespace) -> None:
    from jaxllm.cli.remote_model import RemoteModel

    sampling_params_from(args, SamplingParams())  # refuses an invalid flag
    completer = Completer(RemoteModel.from_args(args))
    if args.quick is not None:
        answer(completer, args.quick)
    else:
        converse(completer)


class Completer:
    """Completes every line on its own."""

    def __init__(self, model: "RemoteModel"):
        self._model = model

    def reset(self) -> None:
        """Do nothing: there is no history."""

    def show(self, path: str) -> None:
        raise ValidationError("a completion sees no images; use `jaxllm chat`")

    def reply(self, said: str, stop: threading.Event) -> Iterator[str]:
        return self._model.complete(said, stop)
