"""The operations of a program compiled for a TPU, with the compiler's estimates of their cycles.

libtpu writes into the text of a compiled program how many cycles it expects of each fusion and
copy. Its other estimates differ from these by up to a factor of two. They serve to compare
programs, not to predict a clock.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

# Clocks in MHz, as the compiler's schedules state them.
CLOCK_MHZ = {"v5e": 1500, "v6e": 1750, "v7x": 1900}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_BODIES = re.compile(r"(?:body|true_computation|false_computation)=%?([\w.\-]+)")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$", re.MULTILINE)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_SOURCE = re.compile(r'op_name="([^"]*)"')
_KERNEL = re.compile(r'custom_call_target="tpu_custom_call"')
# They move nothing and compute nothing.
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}


class Operation(NamedTuple):
    """An operation of a computation."""

    name: str
    opcode: str
    types: str  # of its results
    source: str  # the scopes and the primitive that it comes from
    cycles: int | None  # None: the compiler names no estimate
    is_kernel: bool  # a Pallas kernel
    bodies: tuple[str, ...]  # the computations of a loop, or of a condition's sides


def operations(hlo: str, computation: str | None = None) -> Iterator[Operation]:
    """The operations of a computation that take time, in their order; by default of the entry."""
    of_name = {name: (entry, text) for entry, name, text in _COMPUTATION.findall(hlo)}
    if computation is None:
        entries = [name for name, (entry, _) in of_name.items() if entry]
        assert entries, "the program has no entry computation"
        computation = entries[0]
    for name, types, opcode, rest in _OPERATION.findall(of_name[computation][1]):
        if opcode in _FREE:
            continue
        cycles, source = _CYCLES.search(rest), _SOURCE.search(rest)
        yield Operation(
            name,
            opcode,
            types,
            source[1] if source else "",
            int(cycles[1]) if cycles else None,
            bool(_KERNEL.search(rest)),
            tuple(_BODIES.findall(rest)),
        )
