"""Command-line flags, generated from the config's dataclasses and from SamplingParams.

A field becomes a flag of the same name. Its type chooses the parser, and its default is in the
help. A flag that is not given is absent from the namespace. So one place applies defaults:
`EngineConfig.create`, or the model's own sampling defaults.
"""

import argparse
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NoReturn

import msgspec

from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError, shown
from jaxllm.files import parse_json
from jaxllm.sampling_params import SamplingParams
from jaxllm.vllm_options import option_of_flag, why_not

SAMPLING_HELP = {
    "n": "Answers per prompt.",
    "temperature": "Randomness of the choice; 0 always takes the most likely token.",
    "top_p": "Choose among the likeliest tokens whose probabilities add up to this.",
    "top_k": "Choose among this many likeliest tokens; 0 means all.",
    "min_p": "Choose among tokens at least this likely, relative to the likeliest.",
    "presence_penalty": "Lower the logits of tokens that are in the output, once each.",
    "frequency_penalty": "Lower the logits of tokens in the output, for each occurrence.",
    "repetition_penalty": "Divide the logits of tokens in the prompt or output; 1 means off.",
    "stop": "End the answer at any of these strings.",
    "stop_token_ids": "End the answer at any of these tokens.",
    "include_stop_str_in_output": "Keep the stop string or stop token in the text.",
    "ignore_eos": "Go on after the end-of-sequence token.",
    "max_tokens": "Most tokens of an answer.",
    "min_tokens": "Fewest tokens of an answer: no end-of-sequence or stop before.",
    "logprobs": "Report the logprobs of this many likeliest tokens per position; -1 means all.",
    "prompt_logprobs": "The same for the positions of the prompt.",
    "logit_bias": "JSON object: token id to a number added to its logit.",
    "allowed_token_ids": "Choose among these tokens only.",
    "bad_words": "Words that must not be in the answer.",
    "detokenize": "Turn the answer's tokens into text.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "spaces_between_special_tokens": "Put spaces between special tokens in the text.",
    "extra_args": "JSON object for the logits processors of --logits-processors.",
}

SHORT_FLAGS = {
    "enable_expert_parallel": ("-ep",),
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
    "data_parallel_size": ("-dp",),
    "api_server_count": ("-asc",),
    "speculative_config": ("-sc",),
}

# Parameters without a use in a command that prints one answer as text.
TEXT_ONLY = ("n", "detokenize", "logprobs", "prompt_logprobs")

# Fields of SamplingParams without a flag of their own, and the reason.
NOT_FLAGS = {
    "seed": "--seed is the engine's: it seeds every request that brings none",
    "output_kind": "each command sets the kind that it prints",
    "structured_outputs": "`jaxllm generate` has --json-schema, --regex, --choice and --grammar",
    "guided_decoding": "it is refused: it is what vLLM once called structured_outputs",
}


class CommandParser(argparse.ArgumentParser):
    """A parser that raises ValidationError; main() prints every error in the same form."""

    def __init__(self, prog: str, description: str):
        # The generated usage would list sixty flags first.
        usage = f"{prog} [arguments]"
        super().__init__(prog=prog, usage=usage, description=description, allow_abbrev=False)
        self.add_argument(
            "--debug", action="store_true", help="Show the traceback of an error, if there is one."
        )

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        # Intermixed parsing accepts a positional argument after a flag.
        args, unknown = self.parse_known_intermixed_args(argv)
        if unknown:
            raise ValidationError(self._of_unknown(unknown))
        return args

    def _of_unknown(self, unknown: Sequence[str]) -> str:
        # A word after a flag may be its value, so report the flag as unknown.
        word = next((word for word in unknown if word.startswith("-")), unknown[0])
        if (reason := why_not(option_of_flag(word))) is not None:
            return f"{word.partition('=')[0]} is {reason}"
        known = [flag for action in self._actions for flag in action.option_strings]
        near = difflib.get_close_matches(word.split("=")[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"see `{self.prog} --help`"
        return f"unknown argument {word!r}; {hint}"

    def error(self, message: str) -> NoReturn:
        raise ValidationError(f"{message}; see `{self.prog} --help`")


def add_engine_arguments(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """Add a flag for every engine option, one group for each part of EngineConfig.

    The model may also be given without a flag, as the first argument.
    """
    parser.add_argument(
        "positional_model", nargs="?", metavar="MODEL", help="The same as --model MODEL."
    )
    for part in typing.get_type_hints(EngineConfig).values():
        add_option_arguments(parser, part, without=without)


def add_option_arguments(
    parser: argparse.ArgumentParser, options: Any, *, without: Collection[str] = ()
) -> None:
    """Add a flag for every field of a dataclass with fields made by `config.option`."""
    group = parser.add_argument_group(options.__doc__)
    hints = typing.get_type_hints(options)
    for f in dataclasses.fields(options):
        if f.metadata["flag"] and f.name not in without:
            _add_flag(group, f.name, hints[f.name], f.default, f.metadata["help"])


def add_sampling_arguments(
    parser: argparse.ArgumentParser, *, without: Collection[str] = ()
) -> None:
    """Add a flag for every sampling parameter."""
    group = parser.add_argument_group(
        "Sampling",
        "What is not given comes from the model's generation_config.json, then from the defaults.",
    )
    hints = typing.get_type_hints(SamplingParams)
    for f in msgspec.structs.fields(SamplingParams):
        if f.name not in NOT_FLAGS and f.name not in without:
            _add_flag(group, f.name, hints[f.name], f.default, SAMPLING_HELP[f.name])


def add_server_arguments(parser: argparse.ArgumentParser, *, url: str | None = None) -> None:
    """Add the flags that select a server. Without a default, no server is an option."""
    group = parser.add_argument_group("Server")
    instead = "" if url else ", in place of an engine here"
    default = f" Default: {url}." if url else ""
    group.add_argument(
        "--url",
        default=url,
        help=f"Base URL of an OpenAI-compatible server{instead}: http://localhost:8000/v1.{default}",
    )
    group.add_argument(
        "--model-name", metavar="TEXT", help="The server's model. Default: the first that it lists."
    )
    group.add_argument(
        "--api-key",
        metavar="TEXT",
        help="What the server wants as its key. Default: what OPENAI_API_KEY says. Other users of "
        "the machine can see flags, but no files or environment.",
    )
    group.add_argument("--api-key-file", metavar="FILE", help="File with the key.")


def engine_options_from(args: argparse.Namespace) -> dict[str, Any]:
    """The given engine options, as the keyword arguments of `LLM`."""
    options = {
        name: value
        for part in typing.get_type_hints(EngineConfig).values()
        for name, value in options_from(args, part).items()
    }
    if args.positional_model is not None:
        if options.get("model", args.positional_model) != args.positional_model:
            raise ValidationError(
                f"two models: {args.positional_model!r} and --model {options['model']!r}; "
                "give one of them"
            )
        options["model"] = args.positional_model
    return options


def options_from(args: argparse.Namespace, options: Any) -> dict[str, Any]:
    """The given fields of a dataclass of options."""
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(options) if f.name in args}
    hints = typing.get_type_hints(options)
    return {
        name: tuple(value) if typing.get_origin(hints[name]) is tuple else value
        for name, value in given.items()
    }


def sampling_params_from(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """Override the default parameters with the parsed flags."""
    return defaults.clone(**sampling_fields_from(args))


def sampling_fields_from(args: argparse.Namespace) -> dict[str, Any]:
    """The given sampling parameters."""
    return {name: getattr(args, name) for name in SAMPLING_HELP if name in args}


def integer(text: str) -> int:
    """Parse a whole number, also as a size: 2k = 2000, 25.6k = 25600, 2K = 2Ki = 2048, 4GiB."""
    match = re.fullmatch(r"([+-]?\d+(?:\.\d+)?)(?:([kmgt])|([KMGT])(?:iB?)?)?", text.strip())
    if match:
        decimal, binary = match[2], match[3]
        factor = 1000 ** ("kmgt".index(decimal) + 1) if decimal else 1
        factor = 1024 ** ("KMGT".index(binary) + 1) if binary else factor
        value = Fraction(match[1]) * factor
        if value.denominator == 1:
            return int(value)
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a whole number; write 4096, 4k (4000), 4K (4096) or 4GiB"
    )


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{shown(text)} is not a JSON object such as {{"a": 1}}')
    return value


def _add_flag(group: Any, name: str, hint: Any, default: Any, text: str) -> None:
    settings = _settings(hint)
    is_switch = settings.get("action") is argparse.BooleanOptionalAction
    if is_switch and default is not None:
        text += f" Default: {'on' if default else 'off'}."
    elif default not in (None, "", (), dataclasses.MISSING, msgspec.NODEFAULT):
        shown = " ".join(default) if isinstance(default, tuple) else default
        text += f" Default: {shown}."
    group.add_argument(
        *SHORT_FLAGS.get(name, ()),
        "--" + name.replace("_", "-"),
        dest=name,
        default=argparse.SUPPRESS,
        help=text.replace("%", "%%"),
        **settings,
    )


def _or_words(settings: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """The settings of a value that may also be one of these words."""
    parse = settings["type"]
    return {
        "type": lambda text: text if text in words else parse(text),
        "metavar": "|".join((settings["metavar"], *words)),
    }


def _settings(hint: Any) -> dict[str, Any]:
    """The arguments of add_argument for a value of this type."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        # `list[str] | str | None` is parsed like its first member.
        hint, *others = typing.get_args(hint)
        words = [w for m in others if typing.get_origin(m) is Literal for w in typing.get_args(m)]
        if words:
            return _or_words(_settings(hint), words)
    origin = typing.get_origin(hint) or hint
    if origin is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin is Literal:
        return {"choices": typing.get_args(hint)}
    if origin is list:
        # Accept one flag with several values, or the flag several times.
        (item,) = typing.get_args(hint)
        return {"action": "extend", "nargs": "+", **_settings(item)}
    if origin is tuple:
        return {"action": "extend", "nargs": "+", **_settings(str)}
    if origin in (dict, Mapping):
        return {"type": json_object, "metavar": "JSON"}
    parse, metavar = {int: (integer, "N"), float: (float, "X"), str: (str, "TEXT")}[origin]
    return {"type": parse, "metavar": metavar}
