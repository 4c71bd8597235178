"""Memory that is free goes back to the system."""

import subprocess
import sys

import pytest

# Many pieces, and one above them, below which the heap stays as large as it was.
CODE = """
import ctypes
from jaxllm.heap import trim_heap
from jaxllm.metrics.memory import resident_bytes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
pieces = [libc.malloc(1 << 16) for _ in range(1 << 12)]
for piece in pieces:
    ctypes.memset(piece, 1, 1 << 16)
last = libc.malloc(1 << 10)
for piece in pieces:
    libc.free(piece)
before = resident_bytes()
trim_heap()
print(before - resident_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a habit of glibc")
def test_free_pages_below_one_in_use_are_given_back():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 200 << 20  # of 256 MiB
