"""Reads files that others have made. It refuses irregular files, files that are too large and
malformed JSON, in one line that names the file.

Otherwise a read could wait for ever for a pipe, or read a device without end, and brackets that are
nested deeper than Python's stack would end in a traceback.
"""

import json
import os
import select
import stat
from pathlib import Path
from typing import Any, BinaryIO

from jaxllm.errors import CheckpointError, ValidationError, not_utf8

# The largest configs in use have a few hundred kilobytes.
MAX_JSON_BYTES = 16 << 20
MAX_JSON_DEPTH = 64
# The most bytes of a file that a user names beside a model: a template, keys.
_MAX_GIVEN_BYTES = 1 << 20
_PIPE_WAIT_S = 10.0


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text; raise ValueError, whatever is wrong with it."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep(MAX_JSON_DEPTH) from None
    if is_nested_deeper(value, MAX_JSON_DEPTH):
        raise _too_deep(MAX_JSON_DEPTH)
    return value


def is_nested_deeper(value: Any, max_depth: int) -> bool:
    """Whether the lists and dicts of a decoded value are nested deeper than `max_depth` levels."""
    level = [value]
    for _ in range(max_depth):
        level = [one for outer in level for one in _inside(outer) if isinstance(one, dict | list)]
        if not level:
            return False
    return True


def read_json(path: Path, *, most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object of a checkpoint, such as config.json; raise CheckpointError."""
    try:
        value = parse_json(read_bytes(path, most=most).decode("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def read_bytes(path: Path, *, most: int) -> bytes:
    """Read the bytes of a file of a checkpoint; raise CheckpointError."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise CheckpointError(f"{path} is longer than {most} bytes, the most that it may have")
    return data


def open_regular(path: Path) -> BinaryIO:
    """Open a file of a checkpoint, or the file that a link names; raise CheckpointError."""
    check_is_regular(path)
    try:
        # O_NONBLOCK: do not wait if the file has become a pipe since the check.
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return file


def check_is_regular(path: Path) -> None:
    """Refuse a path that is missing or not a regular file, without opening it."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; is {path.parent} a model directory?") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is {_kind(mode)}, not a regular file")


def read_given_text(path: str, *, wait_s: float = _PIPE_WAIT_S) -> str:
    """Read a small text that a user names beside the model; raise ValidationError.

    It may be a pipe, as a shell's `<(...)`, but its writer must not be silent for `wait_s`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            data = _read_all(descriptor, path, wait_s)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ValidationError(f"{path}: {error.strerror}; check the path") from error
    if len(data) > _MAX_GIVEN_BYTES:
        raise ValidationError(f"{path} is longer than {_MAX_GIVEN_BYTES} bytes; is it the file?")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from None


def _read_all(descriptor: int, path: str, wait_s: float) -> bytes:
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        raise ValidationError(f"{path} is {_kind(mode)}, not a file; give another path")
    data = b""
    while len(data) <= _MAX_GIVEN_BYTES:
        if stat.S_ISFIFO(mode) and not select.select([descriptor], [], [], wait_s)[0]:
            raise ValidationError(f"{path} is a pipe that nobody has written to for {wait_s:g} s")
        part = os.read(descriptor, 1 << 16)
        if not part:
            break
        data += part
    return data


def _kind(mode: int) -> str:
    for is_kind, words in (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if is_kind(mode):
            return words
    return "a device"


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep(max_depth: int) -> ValueError:
    return ValueError(f"it is nested deeper than {max_depth} levels")
