"""Returns memory that this process has freed to the system."""

import ctypes
import sys


def trim_heap() -> None:
    """Ask glibc to return free pages anywhere in its heaps. By itself it keeps free pages below the
    last used one: after a compilation most of a gigabyte, and then this takes a tenth of a second.
    Without glibc this does nothing."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(ctypes.c_size_t(0))
