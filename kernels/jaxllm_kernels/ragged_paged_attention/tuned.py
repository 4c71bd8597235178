"""Measured block sizes, in tuned/<chip>.json beside this file.

A file has a list of entries for each kernel. An entry has the case (`key`), its best sizes
(`sizes`), and the evidence (`measured`: time, command, versions, date):

    {"tpu_decode": [{"key": {"num_heads": 32, ...}, "sizes": {"slot_tokens": 512, ...},
                     "measured": {"microseconds": 41.0, "command": "...", "jax": "...", ...}}]}

Every entry needs a measurement. A formula chooses the sizes of other cases.
"""

import functools
import json
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent / "tuned"

Key = dict[str, int | str | None]


def lookup(chip: str, kernel: str, key: Key) -> dict[str, Any] | None:
    """The sizes that were measured for a kernel on a chip, if any."""
    for entry in _read(chip).get(kernel, []):
        if entry["key"] == key:
            return entry["sizes"]
    return None


def log_if_missing(chip: str, kernel: str, key: Key) -> None:
    """Log once that a kernel about to run has no measured sizes."""
    if lookup(chip, kernel, key) is None:
        _log_missing(chip, kernel, ", ".join(f"{name}={key[name]}" for name in sorted(key)))


@functools.cache
def _log_missing(chip: str, kernel: str, shown: str) -> None:
    logger.info("%s on %s: nothing measured for %s; sizes by formula", kernel, chip, shown)


@functools.cache
def _read(chip: str) -> dict[str, list[dict[str, Any]]]:
    path = _FOLDER / f"{chip}.json"
    return json.loads(path.read_text()) if path.exists() else {}
