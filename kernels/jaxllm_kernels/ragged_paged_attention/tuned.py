"""Block sizes that were measured, in tuned/<chip>.json beside this file.

A file has a list of entries for each kernel. An entry says what it is for (`key`), what is best
there (`sizes`), and how one knows (`measured`: time, command, versions, date):

    {"tpu_decode": [{"key": {"num_heads": 32, ...}, "sizes": {"slot_tokens": 512, ...},
                     "measured": {"microseconds": 41.0, "command": "...", "jax": "...", ...}}]}

There are no entries without a measurement. What is missing is chosen by formula.
"""

import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent / "tuned"


def lookup(chip: str, kernel: str, key: Mapping[str, int | str | None]) -> dict[str, Any] | None:
    """The sizes measured for a kernel on a chip; None, and a line in the log, if there are none."""
    return _lookup(chip, kernel, tuple(sorted(key.items())))


@functools.cache
def _lookup(
    chip: str, kernel: str, key: tuple[tuple[str, int | str | None], ...]
) -> dict[str, Any] | None:
    for entry in _read(chip).get(kernel, []):
        if entry["key"] == dict(key):
            return entry["sizes"]
    shown = ", ".join(f"{name}={value}" for name, value in key)
    logger.info("%s on %s: nothing measured for %s; sizes by formula", kernel, chip, shown)
    return None


@functools.cache
def _read(chip: str) -> dict[str, list[dict[str, Any]]]:
    path = _FOLDER / f"{chip}.json"
    return json.loads(path.read_text()) if path.exists() else {}
