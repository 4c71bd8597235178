"""What the text of a compiled program tells: which collectives it runs, what it copies whole."""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import jax

_COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
# An instruction: its results' types, then its name. Of an asynchronous pair, the first counts.
_COLLECTIVE = re.compile(rf"= (.*?) ({_COLLECTIVES})(-start)?\(")
# With the result's shape and layout, or those of the first of an asynchronous copy's results.
_COPY = re.compile(r"= \(?(\w+)\[([\d,]+)\](\S*).*? (copy|copy-start|transpose)\(")
# Where a layout puts an array into a TPU's VMEM.
_IN_VMEM = "S(1)"
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """An instruction in which devices exchange data."""

    opcode: str
    num_bytes: int  # of its result on one device


class Copy(NamedTuple):
    """An instruction that moves an array without computing anything."""

    dtype: str
    shape: tuple[int, ...]
    opcode: str


def collectives(hlo: str) -> list[Collective]:
    """All collectives that stand in the program; those in a loop's body stand there once."""
    return [
        Collective(opcode, _num_bytes(types, asynchronous=bool(start)))
        for types, opcode, start in _COLLECTIVE.findall(hlo)
    ]


def copies(hlo: str) -> list[Copy]:
    """All copies and transpositions, but for weights that are fetched ahead of their use."""
    return [
        Copy(dtype, tuple(map(int, dims.split(","))), opcode)
        for dtype, dims, layout, opcode in _COPY.findall(hlo)
        if not (opcode == "copy-start" and _IN_VMEM in layout)
    ]


def whole_array_copies(hlo: str, arrays: Iterable[jax.ShapeDtypeStruct]) -> list[Copy]:
    """Copies and transpositions of something that has the shape of a device's share of one of the
    arrays, in any order of its axes. Arrays of less than a MiB are too common a shape to be told
    apart."""
    shapes = set()
    for array in arrays:
        shape = array.shape if array.sharding is None else array.sharding.shard_shape(array.shape)
        if math.prod(shape) * array.dtype.itemsize >= 1 << 20:
            shapes.add(_extent(shape))
    return [copy for copy in copies(hlo) if _extent(copy.shape) in shapes]


def _extent(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size > 1))


def _num_bytes(types: str, *, asynchronous: bool) -> int:
    """Of a result; that of an asynchronous start names its operands first, then its results."""
    sizes = [
        math.prod(map(int, filter(None, dims.split(",")))) * max(int(bits or 8) // 8, 1)
        for _, bits, dims in _ARRAY.findall(types)
    ]
    return max(sizes, default=0) if asynchronous else sum(sizes)
