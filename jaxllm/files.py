"""Files that somebody else has made. What is no regular file, is too large or is not the JSON that
it should be is refused here, in one line that names the file.

A pipe in the place of a file would be waited for without end, a device be read without end, and
brackets that are nested deeper than Python's stack would end in a traceback.
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
# What a user names on the command line beside a model: a template, keys.
_MAX_GIVEN_BYTES = 1 << 20
_PIPE_WAIT_S = 10.0


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; raises ValueError, whatever is wrong with it."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep(MAX_JSON_DEPTH) from None
    if is_nested_deeper(value, MAX_JSON_DEPTH):
        raise _too_deep(MAX_JSON_DEPTH)
    return value


def is_nested_deeper(value: Any, max_depth: int) -> bool:
    """Whether lists and dicts of a decoded value are nested deeper than so many levels."""
    level = [value]
    for _ in range(max_depth):
        level = [one for outer in level for one in _inside(outer) if isinstance(one, dict | list)]
        if not level:
            return False
    return True


def read_json(path: Path, *, most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object of a checkpoint, such as config.json; raises CheckpointError."""
    try:
        value = parse_json(read_bytes(path, most=most).decode("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def read_bytes(path: Path, *, most: int) -> bytes:
    """The bytes of a file of a checkpoint; raises CheckpointError."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise CheckpointError(f"{path} is longer than {most} bytes, the most that it may have")
    return data


def open_regular(path: Path) -> BinaryIO:
    """Open a file of a checkpoint, or what a link to one leads to; raises CheckpointError."""
    check_is_regular(path)
    try:
        # Not waiting, should it have become a pipe just now.
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return file


def check_is_regular(path: Path) -> None:
    """Refuse what is no file, or none that has an end, without opening it."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; is {path.parent} a model directory?") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is {_kind(mode)}, not a regular file")


def read_given_text(path: str, *, wait_s: float = _PIPE_WAIT_S) -> str:
    """Read a small text that a user names beside the model; raises ValidationError.

    It may be a pipe, as `<(...)` of a shell is, but somebody must write to it.
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
