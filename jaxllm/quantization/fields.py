"""Checks of fields of `quantization_config`, and the patterns of the names in it."""

import re
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown

FIELD = "quantization_config"
EVERY = ""  # matches all names


def block(value: object, name: str) -> tuple[int, int]:
    """Two sizes, of outputs and inputs."""
    if isinstance(value, str):
        value = [int(part) if part.isdecimal() else 0 for part in value.split("x")]
    sizes = list(value) if isinstance(value, (list, tuple)) else []
    if len(sizes) != 2 or not all(type(size) is int and 1 <= size <= 1 << 20 for size in sizes):
        raise CheckpointError(
            f"config.json: {FIELD}.{name}={shown(value)} must be two sizes, of outputs and inputs"
        )
    return sizes[0], sizes[1]


def names_of(config: Mapping[str, Any], field: str, where: str = "") -> list[str]:
    """A list of names; empty if the field is missing."""
    names = config.get(field)
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        place = ".".join(filter(None, (FIELD, where, field)))
        raise CheckpointError(f"config.json: {place}={shown(names)} must be a list of names")
    return names


def pattern(name: str) -> str:
    """The pattern of a target: a class, a name, or a regular expression after "re:"."""
    if name == "Linear":
        return EVERY
    if not name.startswith("re:"):
        return f"{re.escape(name)}$"
    expression = name.removeprefix("re:")
    try:
        re.compile(expression)
    except re.error as error:
        raise CheckpointError(
            f"config.json: {FIELD} has the pattern {shown(expression)}: {error}"
        ) from error
    return expression


def inside(name: str) -> str:
    """The pattern of a module with this name, or of one inside it. The beginning of the whole name
    may be left out."""
    return rf"(.*\.)?{re.escape(name)}(\.|$)"


def glob(name: str) -> str:
    """Likewise, where * stands for anything."""
    return rf"(.*\.)?{re.escape(name).replace(re.escape('*'), '.*')}(\.|$)"


def check_fields(config: Mapping[str, Any], known: set[str], where: str = "") -> None:
    """Refuse fields that nobody reads."""
    unknown = sorted(set(config) - known)
    if unknown:
        place = ".".join(filter(None, (FIELD, where, unknown[0])))
        raise UnsupportedModelError(f"{place:.200} is not supported: nothing here knows the field")


def check_one_of(
    config: Mapping[str, Any], field: str, supported: tuple[object, ...], where: str = ""
) -> None:
    """Refuse a field with another value."""
    value = config.get(field)
    if not any(type(value) is type(one) and value == one for one in supported):
        place = ".".join(filter(None, (FIELD, where, field)))
        names = [shown(one) for one in supported if one is not None]
        raise UnsupportedModelError(
            f"{place:.200}={shown(value)} is not supported; supported are {', '.join(names)}"
        )
