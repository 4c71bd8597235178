"""What two engines say to each other: one question and one answer for each block.

A question is [identity, group and content]. Its answer is [group and content, status], and if the
block is there, [..., digest, arrays]. Frames are those of ZeroMQ.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

_KEY = struct.Struct("<I32s")  # cache group, hash of the content
HERE, MISSING, FOREIGN = b"+", b"-", b"?"
_DIGEST_BYTES = 32


class Wanted(NamedTuple):
    """A block of a cache group, by its content."""

    group: int
    content: bytes

    def encode(self) -> bytes:
        return _KEY.pack(self.group, self.content)

    @classmethod
    def decode(cls, frame: bytes) -> "Wanted | None":
        return cls(*_KEY.unpack(frame)) if len(frame) == _KEY.size else None


def digest(parts: Sequence[Any]) -> bytes:
    """A hash of a block's arrays."""
    its = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        its.update(part)
    return its.digest()
