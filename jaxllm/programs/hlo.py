"""Reads the text of a compiled program: its collectives, and its copies of whole arrays."""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import jax

_COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
# An instruction: the types of its results, then its name. Asynchronous pairs count at their start.
_COLLECTIVE = re.compile(rf"= (.*?) ({_COLLECTIVES})(-start)?\(")
# With the shape and layout of the result, or of an asynchronous copy's first result.
_COPY = re.compile(r"= \(?(\w+)\[([\d,]+)\](\S*).*? (copy|copy-start|transpose)\(")
# The part of a layout that places an array in a TPU's VMEM.
_IN_VMEM = "S(1)"
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """An instruction in which devices exchange data."""

    opcode: str
    num_bytes: int  # of the result on one device


class Copy(NamedTuple):
    """An instruction that moves an array without computing anything."""

    dtype: str
    shape: tuple[int, ...]
    opcode: str


def collectives(hlo: str) -> list[Collective]:
    """All collectives in the program's text; one in a loop's body counts once."""
    return [
        Collective(opcode, _num_bytes(types, asynchronous=bool(start)))
        for types, opcode, start in _COLLECTIVE.findall(hlo)
    ]


def copies(hlo: str) -> list[Copy]:
    """All copies and transpositions, except prefetches of weights into VMEM."""
    return [
        Copy(dtype, tuple(map(int, dims.split(","))), opcode)
        for dtype, dims, layout, opcode in _COPY.findall(hlo)
        if not (opcode == "copy-start" and _IN_VMEM in layout)
    ]


def whole_array_copies(hlo: str, arrays: Iterable[jax.ShapeDtypeStruct]) -> list[Copy]:
    """Copies and transpositions of an array with the shape of a device's shard of one of the
    arrays, in any order of axes. Arrays below a MiB are skipped: their shapes are too common."""
    shapes = set()
    for array in arrays:
        shape = array.shape if array.sharding is None else array.sharding.shard_shape(array.shape)
        if math.prod(shape) * array.dtype.itemsize >= 1 << 20:
            shapes.add(_extent(shape))
    return [copy for copy in copies(hlo) if _extent(copy.shape) in shapes]


def _extent(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size > 1))


def _num_bytes(types: str, *, asynchronous: bool) -> int:
    """Bytes of a result. The type of an asynchronous start has its operands first."""
    sizes = [
        math.prod(map(int, filter(None, dims.split(",")))) * max(int(bits or 8) // 8, 1)
        for _, bits, dims in _ARRAY.findall(types)
    ]
    return max(sizes, default=0) if asynchronous else sum(sizes)
