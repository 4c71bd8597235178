"""Reads lines of the input as items, in bounded memory.

Items are numbered from 0 in the order of the file. Empty lines are not items, but count as lines. A
line that cannot be read is an item with an error in place of its text.
"""

import codecs
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from jaxllm.errors import ValidationError, refused

_READ_BYTES = 1 << 20


class Item(NamedTuple):
    """One request in the file."""

    number: int
    line: int  # line number from 1, as in editors
    text: str | ValidationError
    num_bytes: int  # of the file, from the end of the previous item


def read_items(file: BinaryIO, max_line_bytes: int) -> Iterator[Item]:
    """Yield all items of a file. Holds one line at a time, and only the head of an overlong one."""
    number = line = num_bytes = 0
    for data, size in _lines(file, max_line_bytes):
        line += 1
        num_bytes += size
        if line == 1:
            data = data.removeprefix(codecs.BOM_UTF8)
        if size <= max_line_bytes and not data.strip():
            continue
        yield Item(number, line, _text(data, size, max_line_bytes), num_bytes)
        number += 1
        num_bytes = 0


def _text(data: bytes, size: int, max_line_bytes: int) -> str | ValidationError:
    if size > max_line_bytes:
        return refused("line", f"{size} bytes", f"at most --max-line-bytes={max_line_bytes}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        return ValidationError(
            f"not UTF-8 at byte {error.start} of the line ({error.reason}); convert the file"
        )


def _lines(file: BinaryIO, max_line_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield lines and their sizes, with line ends; of an overlong line, yield only the head."""
    kept, size = bytearray(), 0
    while data := file.read(_READ_BYTES):
        start = 0
        while start < len(data):
            end = data.find(b"\n", start) + 1
            piece = data[start : end or len(data)]
            size += len(piece)
            if len(kept) <= max_line_bytes:
                kept += piece
            if end:
                yield bytes(kept), size
                kept, size = bytearray(), 0
            start = end or len(data)
    if size:
        yield bytes(kept), size
