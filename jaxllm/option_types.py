"""The fields of configs: how an option is declared, and whether its value has the type."""

import types
import typing
from dataclasses import field
from typing import Any, Literal

from jaxllm.errors import ValidationError


def option(default: Any, help: str, *, flag: bool = True) -> Any:
    """Declare a config field: its default, its help text, whether the CLI has a flag for it."""
    return field(default=default, metadata={"help": help, "flag": flag})


def check_type(name: str, value: object, hint: Any) -> None:
    """Refuse a value of another type."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    members = typing.get_args(hint) if union else (hint,)
    words = [w for m in members if typing.get_origin(m) is Literal for w in typing.get_args(m)]
    if isinstance(value, str) and value in words:
        return
    kinds = tuple(typing.get_origin(member) or member for member in members)
    kinds = tuple(kind for kind in kinds if kind is not Literal)
    if words and (not kinds or isinstance(value, str)):
        raise ValidationError(
            f"{name}={value!r} is not one of {', '.join(map(repr, words))}",
            parameter=name,
            value=value,
        )
    if float in kinds:
        kinds += (int,)
    if isinstance(value, bool) and bool not in kinds or not isinstance(value, kinds):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValidationError(
            f"{name}={value!r} has type {type(value).__name__}; it must be {wanted}",
            parameter=name,
            value=value,
        )
