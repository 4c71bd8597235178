"""Imports at start-up, of a thousand modules and more."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Import here without looking for garbage. What modules define stays, and to look through all
    of it again and again takes up to a sixth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
