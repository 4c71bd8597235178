"""Large pages for weights in a host's memory.

A decode step reads all weights once. A processor reads ahead within a page and not beyond it, so in
pages of 4 KiB it waits at the head of each. Linux gives large ones only where it is asked to.
"""

import ctypes
import sys
from collections.abc import Iterable

import jax
import numpy as np

from jaxllm.logging import init_logger

logger = init_logger(__name__)

_HUGE_PAGE = 2 << 20
# Of madvise(2): now, and not when the kernel gets round to it. Since Linux 6.1.
_MADV_COLLAPSE = 25


def use_huge_pages(arrays: Iterable[jax.Array]) -> None:
    """Move the large ones of these CPU arrays into large pages, as far as there are any; the arrays
    stay where they are."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    moved = total = 0
    for array in arrays:
        if len(array.sharding.device_set) > 1:
            continue  # several devices on one CPU are there to be tested, and not to be fast
        address = np.asarray(array).ctypes.data  # which copies nothing on a CPU
        start = -(-address // _HUGE_PAGE) * _HUGE_PAGE
        length = (address + array.nbytes) // _HUGE_PAGE * _HUGE_PAGE - start
        if length > 0:
            done = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_COLLAPSE)
            moved, total = moved + (done == 0), total + 1
    logger.debug("%d of %d large arrays are in large pages", moved, total)
