"""The launches of a program that was compiled for a GPU, from XLA's listing of them.

With the compiler option `xla_dump_to`, XLA writes what the host does in a program: a tree, because
a command buffer (a CUDA graph), a conditional and a loop have launches in them.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jax

from jaxllm.programs.compile import Program

_LAUNCH = re.compile(r"^( *)\d+: (k\w+) *(?:\[.*?\])? *(.*)$")
_BRANCH = re.compile(r"^ *(\w+):$")
_NAME = re.compile(r"[\w.]+")


@dataclass(frozen=True)
class Launch:
    """A node of the listing."""

    kind: str  # XLA's, such as kCustomKernel
    name: str  # of the kernel, without the number by which XLA tells equal names apart
    branches: list[list["Launch"]] = field(default_factory=list)


def compile_and_list(
    program: Program, folder: Path
) -> tuple[jax.stages.Lowered, jax.stages.Compiled, list[Launch]]:
    """Compile a program; `folder`, which must be new, gets XLA's dumps."""
    options = (*program.compiler_options, ("xla_dump_to", str(folder)))
    program = dataclasses.replace(program, compiler_options=options)
    lowered = program.lower()
    compiled = program.compile(lowered)
    return lowered, compiled, read_listing(folder)


def read_listing(folder: Path) -> list[Launch]:
    """The outermost launches of the program whose dumps are in a folder."""
    # XLA writes the first only if it makes a command buffer of the second.
    listings = [*folder.glob("*thunk_sequence_after_thunk_passes.txt")]
    listings = listings or [*folder.glob("*thunk_sequence.txt")]
    if len(listings) != 1:
        raise ValueError(f"{folder} has the launches of {len(listings)} programs, and not of one")
    return parse(listings[0].read_text())


def parse(listing: str) -> list[Launch]:
    """The outermost launches of a listing, with those in them."""
    outermost: list[Launch] = []
    # The launches around the current line, with their indentations.
    around: list[tuple[int, Launch]] = []
    latest: tuple[int, Launch] | None = None
    for line in listing.splitlines():
        if _BRANCH.match(line):
            # XLA does not indent the names of all branches; a branch is of the latest launch that
            # can have one, or follows another of its branches.
            indent = len(line) - len(line.lstrip())
            if latest is not None and latest[1].kind in ("kConditional", "kWhile"):
                around, owner = [*around, latest], latest[1]
                latest = None
            else:
                while around and around[-1][0] >= indent:
                    around.pop()
                owner = around[-1][1]
            owner.branches.append([])
        elif match := _LAUNCH.match(line):
            indent, launch = len(match[1]), Launch(match[2], _name(match[3]))
            if latest is not None and latest[0] < indent:  # the content of a command buffer
                around.append(latest)
                latest[1].branches.append([])
            while around and around[-1][0] >= indent:
                around.pop()
            (around[-1][1].branches[-1] if around else outermost).append(launch)
            latest = indent, launch
    return outermost


def in_command_buffer(outermost: list[Launch]) -> list[Launch]:
    """What is directly in a program's only command buffer."""
    kinds = [launch.kind for launch in outermost]
    assert kinds == ["kCommandBuffer"], f"a step is not one graph: {kinds}"
    return outermost[0].branches[0]


def all_launches(launches: Iterable[Launch]) -> Iterator[Launch]:
    """The launches and all those in them."""
    for launch in launches:
        yield launch
        for branch in launch.branches:
            yield from all_launches(branch)


def least(launches: Iterable[Launch]) -> int:
    """How many run if every conditional takes its shortest branch."""
    return sum(
        1 + min((least(branch) for branch in launch.branches), default=0) for launch in launches
    )


def by_name(launches: Iterable[Launch]) -> Counter[str]:
    return Counter(launch.name for launch in launches)


def _name(rest: str) -> str:
    match = _NAME.match(rest)
    return re.sub(r"(_\d+)+$", "", match[0]) if match else ""
