"""How many cycles a compiled TPU kernel takes at least for given work, by following its code.

A TPU core issues one bundle of instructions a cycle, in the order of the code. libtpu prints the
bundles of a kernel. Its loops and branches depend on numbers in scalar memory: the worklists of a
step. So this module executes the scalar instructions of a listing, with worklists as operands, and
counts the bundles on the way. Vector instructions have no part in that.

Copies from and to HBM are served one after another at the memory's bandwidth. They have no latency,
and a bundle never stalls for anything but a copy that is waited for. So the sum is a lower bound.
"""

import bisect
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# What a copy's size is counted in.
GRANULE_BYTES = 32

_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]{2})?: *>* *\{(.*)\}([^{}]*)$")
_COMMENT = re.compile(r"/\*.*?\*/")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_INSTRUCTION = re.compile(r"^(?:%?(\S+) = )?([a-z][\w.<]*)(.*)$")
_PREDICATE = re.compile(r"\((!?)%(p\w+)(?:, ([^)]*))?\)")
_VALUE = re.compile(r"%([sp]\w+)$")
_ALLOCATION = re.compile(r"\[(#allocation\w+)\]")
_TARGET = re.compile(r"target = \$region(\d+)")

# Kinds of instructions that neither compute scalars nor move data.
_IGNORED = ("v", "shalt", "sfence")
# Names for other values, not instructions.
_NAMES = ("sphi", "int_to_ptr.vmem", "int_to_ptr.hbm")


class Place(NamedTuple):
    """An address: a number of words or bytes behind the begin of an allocation or an operand."""

    name: str
    offset: int


class Instruction(NamedTuple):
    opcode: str
    result: str | None  # the name of a value
    arguments: tuple[Any, ...]  # names of values, numbers and places
    # A value, what it is if the instruction is executed, and the result if it is not.
    predicate: tuple[str, bool, Any] | None


@dataclass
class Code:
    """A kernel's listing."""

    bundles: list[tuple[Instruction, ...]]
    regions: dict[int, int]  # the first bundle of a region
    delays: dict[int, int]  # of a branch: bundles behind it that are executed before it


class Outcome(NamedTuple):
    """What a kernel takes."""

    bundles: int  # executed
    cycles: float  # with waits for copies
    copied_bytes: int  # from and to HBM
    executions: list[int]  # of each bundle


def read_code(path: Path) -> Code:
    """Read a listing, `*-final_bundles.txt`."""
    bundles, regions = [], {}
    for line in path.read_text().splitlines():
        match = _BUNDLE.match(line)
        if match is None:
            continue
        for region in _REGION.findall(line):
            regions.setdefault(int(region), len(bundles))
        body = _COMMENT.sub("", match[1])
        parts = (_read_instruction(part.strip()) for part in body.split(";;"))
        found = [one for one in parts if one is not None]
        bundles.append(tuple(sorted(found, key=lambda one: one.opcode != "sphi")))
    return Code(bundles, regions, _find_delays(bundles, regions))


# The most bundles behind a branch that are executed before it, on any chip.
_LONGEST_DELAY = 6


def _find_delays(bundles: list[tuple[Instruction, ...]], regions: dict[int, int]) -> dict[int, int]:
    """A branch ends a region, but for its delay. Where the listing does not say that another region
    begins there, the delay is taken for the usual one."""
    starts = sorted(set(regions.values()) | {len(bundles)})
    branches = [i for i, bundle in enumerate(bundles) if any(x.opcode == "sbr.rel" for x in bundle)]
    gaps = {i: starts[bisect.bisect_right(starts, i)] - i - 1 for i in branches}
    short = [gap for gap in gaps.values() if gap <= _LONGEST_DELAY]
    usual = Counter(short).most_common(1)[0][0] if short else 0
    return {i: gap if gap <= _LONGEST_DELAY else usual for i, gap in gaps.items()}


def _read_instruction(text: str) -> Instruction | None:
    match = _INSTRUCTION.match(text)
    if match is None or match[2].startswith(_IGNORED):
        return None
    opcode, rest = match[2], match[3]
    result = match[1] if match[1] and match[1][0] in "sp" else None
    predicate = None
    found = _PREDICATE.search(rest)
    if found is not None:
        predicate = found[2], not found[1], _read_argument(found[3] or "")
        rest = rest.replace(found[0], "", 1).strip().removeprefix(",")
    if opcode.startswith("inlined_call_operand"):
        index = int(re.search(r"index: (\d+)", rest)[1])
        return Instruction("operand", result, (index,), None)
    if opcode == "sbr.rel":
        return Instruction(opcode, None, (int(_TARGET.search(rest)[1]),), predicate)
    if opcode in ("sld", "sst"):
        inner = rest[rest.index("[smem:[") + 7 : rest.index("]]")]
        value = rest[rest.index("]]") + 2 :].lstrip(", ")
        address = tuple(_read_argument(part) for part in inner.split("+"))
        arguments = (address, _read_argument(value)) if opcode == "sst" else (address,)
        return Instruction(opcode, result, arguments, predicate)
    rest = re.sub(r"\[(thread|resolvable)[^\]]*\]", "", rest)
    arguments = tuple(_read_argument(part) for part in rest.split(",") if part.strip())
    return Instruction(opcode, result, arguments, predicate)


def _read_argument(text: str) -> Any:
    text = text.strip()
    match = _VALUE.match(text)
    if match is not None:
        return match[1]
    match = re.match(r"\[?(#allocation\w+)(?: \+ \$(0x[0-9a-f]+))?\]?$", text)
    if match is not None:
        return Place(match[1], int(match[2] or "0", 16))
    text = text.lstrip("$")
    try:
        number = int(text, 0)
    except ValueError:
        return text
    return number - (1 << 32) if number >= 1 << 31 else number


def _wrap(x: int) -> int:
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)


def _add(a: Any, b: Any) -> Any:
    if isinstance(b, Place):
        a, b = b, a
    return Place(a.name, a.offset + b) if isinstance(a, Place) else _wrap(a + b)


def _shift_left(a: Any, b: Any) -> Any:
    return a if isinstance(a, Place) else _wrap(a << b)


_COMPUTE: dict[str, Callable[..., Any]] = {
    "sadd.s32": _add,
    "ssub.s32": lambda a, b: _wrap(a - b),
    "smul.u32": lambda a, b: _wrap(a * b),
    "sand.u32": lambda a, b: _wrap(a & b),
    "sor.u32": lambda a, b: _wrap(a | b),
    "sxor.u32": lambda a, b: _wrap(a ^ b),
    "sshll.u32": _shift_left,
    "sshrl.u32": lambda a, b: a if isinstance(a, Place) else (a % (1 << 32)) >> b,
    "sshra.s32": lambda a, b: a if isinstance(a, Place) else a >> b,
    "smin.u32": lambda a, b: _wrap(min(a % (1 << 32), b % (1 << 32))),
    "smov": lambda a: a,
    "scalar_lea.vmem": _add,
    "scalar_lea.hbm": _add,
    "scalar_lea.smem": _add,
    "scalar_lea.sflag": _add,
    "scmp.eq.s32.totalorder": lambda a, b: a == b,
    "scmp.ne.s32.totalorder": lambda a, b: a != b,
    "scmp.lt.s32.totalorder": lambda a, b: a < b,
    "scmp.le.s32.totalorder": lambda a, b: a <= b,
    "scmp.gt.s32.totalorder": lambda a, b: a > b,
    "scmp.ge.s32.totalorder": lambda a, b: a >= b,
    "pneg": lambda a: not a,
    "por": lambda a, b: a or b,
    "pand": lambda a, b: a and b,
    "pnand": lambda a, b: not (a and b),
    "scalar_select": lambda p, a, b: a if p else b,
}


@dataclass
class _Copies:
    """The copies from and to HBM, one after another."""

    bytes_per_cycle: float
    free: float = 0.0  # when the memory is free again
    copied_bytes: int = 0
    # By semaphore: when how many granules have arrived that nobody has waited for.
    arriving: dict[Place, deque] = field(default_factory=lambda: defaultdict(deque))

    def start(self, now: float, granules: int, semaphore: Place) -> None:
        num_bytes = granules * GRANULE_BYTES
        self.free = max(self.free, now) + num_bytes / self.bytes_per_cycle
        self.copied_bytes += num_bytes
        self.arriving[semaphore].append([self.free, granules])

    def wait(self, now: float, granules: int, semaphore: Place) -> float:
        """The time at which so many have arrived."""
        waiting = self.arriving[semaphore]
        while granules > 0:
            assert waiting, f"nothing arrives at {semaphore}"
            time, left = waiting[0]
            now = max(now, time)
            taken = min(granules, left)
            granules -= taken
            waiting[0][1] -= taken
            if not waiting[0][1]:
                waiting.popleft()
        return now


def follow(code: Code, operands: Sequence[Any], *, bytes_per_cycle: float) -> Outcome:
    """Execute the scalar code of a kernel; operands are arrays of int32, None for others."""
    values: dict[str, Any] = {}
    written_at: dict[str, float] = {}
    memory: dict[str, dict[int, Any]] = defaultdict(dict)
    copies = _Copies(bytes_per_cycle)
    now, at = 0.0, 0
    executions = [0] * len(code.bundles)
    branch: tuple[int, int] | None = None  # bundles until then, and where to

    def value(argument: Any) -> Any:
        # A value that was not computed is computed with in vain.
        return values.get(argument, 0) if isinstance(argument, str) else argument

    def address_of(parts: tuple[Any, ...]) -> Place:
        place: Any = 0
        for part in parts:
            place = _add(place, value(part))
        return place

    while at < len(code.bundles):
        bundle = code.bundles[at]
        # What a bundle computes is read by later ones. Only names of values are of the same.
        written: list[tuple[str, Any]] = []
        for opcode, result, arguments, predicate in bundle:
            if opcode == "sphi":
                newest = max(arguments, key=lambda name: written_at.get(name, -1.0))
                values[result] = values.get(newest)
                continue
            if predicate is not None and value(predicate[0]) != predicate[1]:
                if predicate[2] != "":
                    written.append((result, value(predicate[2])))
                continue
            if opcode == "sbr.rel":
                assert branch is None, "a branch in the delay of another"
                branch = code.delays[at] + 1, code.regions[arguments[0]]
            elif opcode == "sld":
                name, offset = address_of(arguments[0])
                written.append((result, memory[name].get(offset, 0)))
            elif opcode == "sst":
                name, offset = address_of(arguments[0])
                memory[name][offset] = value(arguments[1])
            elif opcode == "operand":
                operand = operands[arguments[0]] if arguments[0] < len(operands) else None
                if operand is not None and np.ndim(operand) == 0:
                    written.append((result, int(operand)))
                else:
                    written.append((result, Place(f"operand{arguments[0]}", 0)))
            elif opcode == "dma.vmem_to_smem":
                source, _, target, _ = map(value, arguments[:4])
                numbers = operands[int(source.name.removeprefix("operand"))]
                memory[target.name] = dict(enumerate(map(int, np.ravel(numbers))))
            elif opcode.startswith("dma.done.wait"):
                semaphore, granules = (value(argument) for argument in arguments[:2])
                if semaphore in copies.arriving:
                    now = copies.wait(now, granules, semaphore)
            elif opcode.startswith("dma."):
                _, granules, _, semaphore = (value(argument) for argument in arguments[:4])
                copies.start(now, granules, semaphore)
            elif opcode not in _NAMES:
                compute = _COMPUTE[opcode]
                written.append((result, compute(*(value(argument) for argument in arguments))))
        for name, new in written:
            values[name] = new
            written_at[name] = now
        for opcode, result, arguments, _ in bundle if written else ():
            if opcode in _NAMES and opcode != "sphi":
                values[result] = value(arguments[0])
                written_at[result] = now
        executions[at] += 1
        now += 1
        at += 1
        if branch is not None:
            left, target = branch
            branch = (left - 1, target)
            if left == 1:
                at, branch = target, None
    return Outcome(sum(executions), now, copies.copied_bytes, executions)
