"""Sizes and use of memory, as plain data. They are read only on request."""

import os
import resource
from pathlib import Path

import msgspec


class DeviceMemory(msgspec.Struct):
    """The memory of one accelerator."""

    device: int
    used_bytes: int
    peak_bytes: int
    limit_bytes: int


class EngineMemory(msgspec.Struct):
    """The memory of an engine's process and of its devices."""

    resident_bytes: int
    # By replica: the devices of this process whose backend reports its memory (a CPU does not).
    devices: list[list[DeviceMemory]]


def resident_bytes() -> int:
    """The memory of this process now; without /proc, its peak."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
