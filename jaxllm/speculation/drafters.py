"""The drafters that propose at the end of a step, by the names of their methods."""

import importlib
from typing import Any

from jaxllm.errors import ValidationError
from jaxllm.speculation.drafter import Drafter
from jaxllm.speculation.ngram import Ngram
from jaxllm.speculative_config import Speculation

_NEEDED = ("abstract", "admit", "record", "propose")


def make_drafter(speculation: Speculation) -> Drafter:
    """Make the drafter of an engine."""
    return DRAFTERS[speculation.method](speculation)


def _of_user(speculation: Speculation) -> Drafter:
    """Make a drafter of a user's class."""
    name = speculation.drafter_class
    assert name is not None, speculation
    module, _, attribute = name.partition(":")
    try:
        drafter: Any = getattr(importlib.import_module(module), attribute)(speculation)
    except Exception as error:  # a user's code may raise anything
        raise _refused(name, f"it cannot be made ({type(error).__name__}: {error})") from error
    missing = [its for its in _NEEDED if not callable(getattr(drafter, its, None))]
    if missing:
        raise _refused(name, f"a drafter has a function {missing[0]}, see jaxllm.speculation")
    return drafter


def _refused(name: str, why: str) -> ValidationError:
    option = "speculative_config"
    return ValidationError(
        f"{option}: model={name!r} is not supported: {why}"[:500], parameter=option, value=name
    )


DRAFTERS = {"ngram": Ngram.of, "custom_class": _of_user}
