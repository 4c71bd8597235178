"""What loops over blocks in the machine code of a GPU kernel take at least, counted by instruction.

Each of the four schedulers of a Hopper multiprocessor issues one instruction in a cycle, and has
one warp of a warpgroup. The unit for exponentials takes eight cycles for a warp. A matrix
instruction takes half a cycle for each of its columns, and of 32 columns at least.
"""

import re
from typing import NamedTuple

_LABEL = re.compile(r"\s*\.(L_x_\w+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(.*?);")
_JUMP = re.compile(r"BRA.*\(\.(L_x_\w+)\)")
_MATRIX = re.compile(r"HGMMA\.64x(\d+)x16")
SPECIAL_CYCLES = 8


class Cycles(NamedTuple):
    """What a warpgroup takes of each unit of a multiprocessor."""

    issue: float
    special: float
    matrix: float

    def times(self, number: float) -> "Cycles":
        return Cycles(*(number * cycles for cycles in self))

    def plus(self, other: "Cycles") -> "Cycles":
        return Cycles(*(a + b for a, b in zip(self, other, strict=True)))


def count(instructions: list[str]) -> Cycles:
    """Count instructions that a warpgroup executes once."""
    matrices = (_MATRIX.search(text) for text in instructions)
    return Cycles(
        issue=len(instructions),
        special=SPECIAL_CYCLES * sum("MUFU" in text for text in instructions),
        matrix=sum(max(int(match[1]), 32) / 2 for match in matrices if match),
    )


def matrix_loops(code: str) -> list[Cycles]:
    """The innermost loops with matrix instructions, in their order: an iteration of each."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.match(line):
            instructions.append(instruction[1])
    loops: list[tuple[int, int]] = []
    for last, text in enumerate(instructions):
        jump = _JUMP.search(text)
        first = labels.get(jump[1], last + 1) if jump else last + 1
        has_matrices = any(map(_MATRIX.search, instructions[first : last + 1]))
        if has_matrices and all(end < first for _, end in loops):
            loops.append((first, last))
    return [count(instructions[first : last + 1]) for first, last in loops]
