"""Reads the header of a GGUF file: metadata, and where its tensors are.

A file has a magic, a version, counts; then keys with typed values; then the name, shape, type and
offset of each tensor; then the tensors, each at a multiple of the alignment. All of it may be
wrong: every count and length is compared with the bytes that are there before anything is made.
"""

import math
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError, shown
from jaxllm.files import open_regular
from jaxllm.gguf.blocks import NAMES, TYPES

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DEPTH = 2  # of arrays in arrays
_MAX_TENSORS = 1 << 20
_MAX_KEYS = 1 << 16
_MAX_STRING = 64 << 20  # bytes; templates and merges have less
_MAX_ARRAY = 1 << 24
_ALIGNMENT = 32
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8",
    12: "<f8",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorPlace:
    """The place of a tensor in its file."""

    file: Path
    type: int  # of its blocks, as in `blocks`
    shape: tuple[int, ...]  # the last axis is contiguous
    offset: int  # of its first byte
    num_bytes: int

    @property
    def type_name(self) -> str:
        return NAMES[self.type]


@dataclass(frozen=True, kw_only=True)
class GGUFHeader:
    """What a file says before its data."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of a file; raise CheckpointError, whatever is wrong with it."""
    with open_regular(path) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size < 24:
            raise CheckpointError(f"{path} is truncated: it has {size} bytes")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(path, data)
            try:
                return reader.header()
            except UnicodeDecodeError as error:
                raise reader.damaged(f"a string is not UTF-8 ({error.reason})") from error


class _Reader:
    """A position in a file's header."""

    def __init__(self, path: Path, data: mmap.mmap):
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged near byte {self._at}: {what}")

    def header(self) -> GGUFHeader:
        if (magic := self._take(4)) != MAGIC:
            raise CheckpointError(f"{self._path} is no GGUF file: it begins with {magic!r}")
        version = self._number("<u4")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            why = "is big-endian" if swapped in _VERSIONS else f"has version {version}"
            raise CheckpointError(
                f"{self._path} {why}, which is not supported; supported are versions "
                f"{' and '.join(map(str, _VERSIONS))}, little-endian"
            )
        num_tensors = self._count("<u8", _MAX_TENSORS, "tensors")
        num_keys = self._count("<u8", _MAX_KEYS, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in metadata:
                raise self.damaged(f"two values for {shown(key)}")
            metadata[key] = self._value(self._number("<u4"), key)
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment % 8:
            raise self.damaged(f"general.alignment={shown(alignment)} must be a multiple of 8")
        places = [self._tensor() for _ in range(num_tensors)]
        start = -(-self._at // alignment) * alignment
        return GGUFHeader(
            path=self._path,
            metadata=metadata,
            tensors=self._placed(places, start, alignment),
        )

    def _placed(
        self, found: list[tuple[str, TensorPlace]], start: int, alignment: int
    ) -> dict[str, TensorPlace]:
        """The tensors by name, with offsets in the file. None may overlap or be outside."""
        tensors: dict[str, TensorPlace] = {}
        end = 0
        for name, place in sorted(found, key=lambda pair: (pair[1].offset, pair[1].num_bytes)):
            if name in tensors:
                raise self.damaged(f"two tensors are named {shown(name)}")
            if place.offset % alignment:
                raise self.damaged(
                    f"tensor {name} begins at byte {place.offset} of the data, which is no "
                    f"multiple of {alignment}"
                )
            if place.offset < end:
                raise self.damaged(f"tensor {name} begins before the one before it ends")
            end = place.offset + place.num_bytes
            if start + end > self._size:
                raise CheckpointError(
                    f"{self._path} is truncated: tensor {name} ends at byte {start + end}, and the "
                    f"file has {self._size}; download it again"
                )
            tensors[name] = TensorPlace(
                file=place.file,
                type=place.type,
                shape=place.shape,
                offset=start + place.offset,
                num_bytes=place.num_bytes,
            )
        return tensors

    def _tensor(self) -> tuple[str, TensorPlace]:
        name = self._string()
        num_axes = self._count("<u4", 4, f"axes of tensor {shown(name)}")
        sizes = [self._count("<u8", 1 << 40, f"sizes of {shown(name)}") for _ in range(num_axes)]
        kind, offset = self._number("<u4"), self._number("<u8")
        if kind not in TYPES:
            raise CheckpointError(
                f"{self._path}: tensor {name:.200} has the type {NAMES.get(kind, kind)}, which is "
                f"not supported; supported are {', '.join(NAMES[its] for its in sorted(TYPES))}"
            )
        shape, block = tuple(reversed(sizes)), TYPES[kind]
        if not shape or shape[-1] % block.size:
            raise self.damaged(
                f"tensor {shown(name)} of shape {shape} has no whole blocks of {block.size}"
            )
        num_bytes = math.prod(shape) // block.size * block.num_bytes
        place = TensorPlace(
            file=self._path, type=kind, shape=shape, offset=offset, num_bytes=num_bytes
        )
        return name, place

    def _value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _BOOL:
            return self._number("<u1") != 0
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth >= _MAX_DEPTH:
            raise self.damaged(f"{shown(key)} has a value of the unknown type {kind}")
        of = self._number("<u4")
        count = self._count("<u8", _MAX_ARRAY, f"elements of {shown(key)}")
        if of in _NUMBERS or of == _BOOL:
            dtype = np.dtype(_NUMBERS.get(of, "<u1"))
            values = np.frombuffer(self._take(count * dtype.itemsize), dtype)
            return (values != 0 if of == _BOOL else values).tolist()
        read: Callable[[], Any] = (
            self._string if of == _STRING else lambda: self._value(of, key, depth + 1)
        )
        return [read() for _ in range(count)]

    def _string(self) -> str:
        # Without numpy, since a vocabulary has hundreds of thousands.
        length = int.from_bytes(self._take(8), "little")
        if length > _MAX_STRING:
            raise self.damaged(f"a string of {length} bytes is longer than {_MAX_STRING}")
        return self._take(length).decode("utf-8")

    def _count(self, dtype: str, most: int, what: str) -> int:
        number = self._number(dtype)
        if number > most:
            raise self.damaged(f"{number} {what} are more than {most}")
        return number

    def _number(self, dtype: str) -> Any:
        size = np.dtype(dtype).itemsize
        return np.frombuffer(self._take(size), dtype)[0].item()

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self._size - self._at:
            raise CheckpointError(
                f"{self._path} is truncated: its header goes on at byte {self._at}, and the file "
                f"has {self._size}"
            )
        taken = self._data[self._at : self._at + num_bytes]
        self._at += num_bytes
        return taken
