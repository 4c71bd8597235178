"""Chooses lengths of random requests that the user does not give, so that they fit the model."""

import math
from dataclasses import replace

from jaxllm.bench.options import DEFAULT_LENGTHS, DatasetOptions
from jaxllm.errors import ValidationError

# The share of the context for tokens that a server adds: a template's, or one at the start.
_SPARE = 1 / 16


def decided(options: DatasetOptions, max_model_len: int | None = None) -> DatasetOptions:
    """Fill in the lengths of random requests. A length that is not given is vLLM's default; if the
    model's context is too short, all such lengths shrink in proportion. Given lengths that do not
    fit are refused.

    Args:
      max_model_len: the most tokens of a prompt and its answer; None if unknown.
    """
    options = _under_their_own_names(options)
    names = _parts(options)
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    missing = {name: DEFAULT_LENGTHS[name] for name in names if name not in given}
    chosen = {name: DEFAULT_LENGTHS[name] for name in DEFAULT_LENGTHS if name not in given}
    if max_model_len is not None and names:
        spread = 1 + (options.random_range_ratio if options.dataset_name == "random" else 0)
        taken = _longest(given, spread)
        if taken + len(missing) > max_model_len:
            flags = ", ".join(f"--{name.replace('_', '-')} {given[name]}" for name in given)
            raise ValidationError(
                f"{flags}: requests of {taken + len(missing)} tokens or more, but the model has "
                f"room for {max_model_len} (max_model_len); ask for less, or start the server "
                "with a greater --max-model-len",
                parameter=next(iter(given), None),
                value=taken,
            )
        room = max_model_len * (1 - _SPARE) - taken
        share = room / max(_longest(missing, spread), 1)
        if share < 1:
            chosen |= {name: max(1, int(num * share)) for name, num in missing.items()}
    return replace(options, **chosen)


def describe(options: DatasetOptions) -> str:
    """Describe the lengths of random requests as flags."""
    return ", ".join(
        f"--{name.replace('_', '-')} {getattr(options, name)}" for name in _parts(options)
    )


def _under_their_own_names(options: DatasetOptions) -> DatasetOptions:
    """Replace --input-len and --output-len, which are other names of these options."""
    changes = {}
    if options.dataset_name == "random" and options.input_len is not None:
        changes["random_input_len"] = options.input_len
    if options.output_len is not None:
        changes["random_output_len"] = options.output_len
        changes["prefix_repetition_output_len"] = options.output_len
    return replace(options, **changes)


def _parts(options: DatasetOptions) -> list[str]:
    """The options for the lengths of a random request's parts."""
    if options.dataset_name == "random":
        prefix = ["random_prefix_len"] * bool(options.random_prefix_len)
        return [*prefix, "random_input_len", "random_output_len"]
    if options.dataset_name == "prefix_repetition":
        return [name for name in DEFAULT_LENGTHS if name.startswith("prefix_repetition_")]
    return []


def _longest(lengths: dict[str, int], spread: float) -> int:
    """The length of the longest request with these parts; a prefix has no spread."""
    return sum(
        num if name == "random_prefix_len" else math.floor(num * spread)
        for name, num in lengths.items()
    )
