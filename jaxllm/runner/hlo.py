"""What the text of a compiled program tells: which collectives it runs, what it copies whole."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import jax

_COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
# An asynchronous collective is two instructions, of which the first counts.
_COLLECTIVE = re.compile(rf" ({_COLLECTIVES})(?:-start)?\(")
# With the result's shape, or that of the first of an asynchronous copy's results.
_COPY = re.compile(r"= \(?(\w+)\[([\d,]+)\].*? (copy|copy-start|transpose)\(")


class Copy(NamedTuple):
    """An instruction that moves an array without computing anything."""

    dtype: str
    shape: tuple[int, ...]
    opcode: str


def collectives(hlo: str) -> Counter[str]:
    """How many of each collective stand in the program; those in a loop's body count once."""
    return Counter(_COLLECTIVE.findall(hlo))


def copies(hlo: str) -> list[Copy]:
    """All copies and transpositions."""
    return [
        Copy(dtype, tuple(map(int, dims.split(","))), opcode)
        for dtype, dims, opcode in _COPY.findall(hlo)
    ]


def whole_array_copies(hlo: str, arrays: Iterable[jax.ShapeDtypeStruct]) -> list[Copy]:
    """Copies and transpositions of something that has the shape of one of the arrays, in any order
    of its axes. Arrays of less than a MiB are too common a shape to be told apart."""
    shapes = {_extent(a.shape) for a in arrays if a.size * a.dtype.itemsize >= 1 << 20}
    return [copy for copy in copies(hlo) if _extent(copy.shape) in shapes]


def _extent(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size > 1))
