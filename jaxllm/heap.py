"""Gives memory that this process has freed back to the system."""

import ctypes
import sys


def trim_heap() -> None:
    """Ask glibc to let go of free pages, wherever in its heaps they are: it keeps those below the
    last one in use, as after a compilation, where they are most of a gigabyte. Takes a tenth of a
    second then; others have no such habit, and nothing is done."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(ctypes.c_size_t(0))
