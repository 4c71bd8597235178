"""Large pages for weights in a host's memory.

A decode step reads all weights once. A processor reads ahead within a page and not beyond it, so
with pages of 4 KiB it waits at the start of each. Linux gives large pages only on request.
"""

import ctypes
import sys
from collections.abc import Iterable

import jax
import numpy as np

from jaxllm.logging import init_logger

logger = init_logger(__name__)

_HUGE_PAGE = 2 << 20
# For madvise(2), since Linux 6.1: the kernel makes large pages now, not at some later time.
_MADV_COLLAPSE = 25


def use_huge_pages(arrays: Iterable[jax.Array]) -> None:
    """Move the CPU arrays that are large enough into large pages, as far as Linux has any. Their
    addresses stay the same."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    moved = total = 0
    for array in arrays:
        if len(array.sharding.device_set) > 1:
            continue  # several devices on one CPU are for tests, not for speed
        address = np.asarray(array).ctypes.data  # on a CPU this copies nothing
        start = -(-address // _HUGE_PAGE) * _HUGE_PAGE
        length = (address + array.nbytes) // _HUGE_PAGE * _HUGE_PAGE - start
        if length > 0:
            done = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_COLLAPSE)
            moved, total = moved + (done == 0), total + 1
    logger.debug("%d of %d large arrays are in large pages", moved, total)
