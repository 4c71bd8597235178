"""How much memory there is and is used, as plain data; asked only when somebody wants to know."""

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
    # By replica: of the devices that this process has, where the backend tells (a CPU does not).
    devices: list[list[DeviceMemory]]


def resident_bytes() -> int:
    """What this process has in memory now; where that is not told, the most it has had."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
