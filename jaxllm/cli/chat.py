"""`jaxllm chat`: a conversation in the terminal, with a local model or one behind a server."""

import argparse

from jaxllm.cli.arguments import (
    TEXT_ONLY,
    add_engine_arguments,
    add_sampling_arguments,
    add_server_arguments,
    engine_options_from,
    sampling_params_from,
)
from jaxllm.cli.conversation import ChatModel, Conversation, answer, converse
from jaxllm.errors import ValidationError
from jaxllm.files import read_given_text
from jaxllm.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--system-prompt", metavar="TEXT", help="Instructions at the head of the conversation."
    )
    parser.add_argument(
        "-q", "--quick", metavar="MESSAGE", help="Say this, print the answer, and leave."
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja template in place of the tokenizer's own."
    )
    add_server_arguments(parser)
    add_sampling_arguments(parser, without=TEXT_ONLY)
    add_engine_arguments(parser, without=("skip_tokenizer_init",))


def run(args: argparse.Namespace) -> None:
    # Refuse an invalid flag before the model is loaded. The model's defaults are known later.
    sampling_params_from(args, SamplingParams(max_tokens=None))
    model = _local_model(args) if args.url is None else _remote_model(args)
    conversation = Conversation(model, args.system_prompt)
    if args.quick is not None:
        answer(conversation, args.quick)
    else:
        converse(conversation)


def _local_model(args: argparse.Namespace) -> ChatModel:
    for name in ("model_name", "api_key", "api_key_file"):
        if getattr(args, name) is not None:
            raise ValidationError(f"{name} needs --url; give it, too")
    options = engine_options_from(args)
    template = read_given_text(args.chat_template) if args.chat_template else None

    from jaxllm.cli.local_model import LocalModel
    from jaxllm.llm import LLM

    llm = LLM(**options)
    # By default the context alone limits an answer.
    defaults = llm.get_default_sampling_params().clone(max_tokens=None)
    params = sampling_params_from(args, defaults)
    return LocalModel(llm.llm_engine, params, chat_template=template)


def _remote_model(args: argparse.Namespace) -> ChatModel:
    of_server = sorted(engine_options_from(args).keys() - {"seed"})
    if args.chat_template is not None:
        of_server.append("chat_template")
    if of_server:
        raise ValidationError(
            f"{', '.join(of_server)}: the server behind --url has its own; leave "
            f"{'it' if len(of_server) == 1 else 'them'} out (--model-name chooses a model there)"
        )
    from jaxllm.cli.remote_model import RemoteModel

    return RemoteModel.from_args(args)
