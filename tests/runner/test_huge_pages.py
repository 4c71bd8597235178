"""Weights of a CPU are moved into large pages, and remain what they are."""

import re
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.runner.huge_pages import use_huge_pages

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def bytes_in_huge_pages(begin: int, end: int) -> int:
    """Of the mappings that have a part of this: a heap may be of several."""
    found, overlaps = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            overlaps = int(mapping[1], 16) < end and begin < int(mapping[2], 16)
        elif overlaps and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) << 10
    return found


@pytest.mark.skipif(
    sys.platform != "linux" or not MODE.exists() or "[never]" in MODE.read_text(),
    reason="the system gives no large pages",
)
def test_a_large_array_lies_in_large_pages():
    host = np.random.default_rng(0).integers(0, 1 << 30, 6 << 20, np.int32)  # 24 MiB
    large, small = jnp.asarray(host).copy().block_until_ready(), jnp.arange(7)
    address = large.unsafe_buffer_pointer()
    use_huge_pages([large, small])
    assert large.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(large, host)
    np.testing.assert_array_equal(small, np.arange(7))
    release = tuple(
        map(int, re.findall(r"\d+", Path("/proc/sys/kernel/osrelease").read_text())[:2])
    )
    if release >= (6, 1):
        # Not how many more there are: some systems give them unasked, or the array a used one.
        assert bytes_in_huge_pages(address, address + large.nbytes) >= 20 << 20


def test_arrays_that_hold_nothing_are_left_alone():
    use_huge_pages([jnp.zeros((0, 3))])
