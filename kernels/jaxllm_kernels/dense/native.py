"""The product on a CPU, in C++: for the few rows of a decode step, where XLA reads weights slowly.

It is compiled on the machine that runs it, for its processor, by whatever compiler is there, and
kept in a directory of the user's. XLA calls it through its foreign function interface.
"""

import ctypes
import hashlib
import importlib.metadata
import math
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxllm_kernels.dense.api import XLA
from jaxllm_kernels.platform import processor

# Above it, XLA's products of blocks are as good.
MAX_ROWS = 64
# What an accumulator takes at a time, at most.
_STEP = 32
_SOURCE = Path(__file__).with_suffix(".cc")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-w")
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 120
_TYPES = {"float32": "f32", "bfloat16": "bf16"}
_registered: set[str] = set()


class NotAvailableError(Exception):
    """There is no such library on this machine, for a reason."""


@dataclass(frozen=True)
class NativeMatmul:
    """`api.Matmul` through a library that is loaded; what it is not made for goes to XLA."""

    build: str  # which library

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        num_rows = math.prod(x.shape[:-1])
        if (
            x.dtype != weight.dtype
            or x.dtype.name not in _TYPES
            or num_rows > MAX_ROWS
            or x.shape[-1] % _STEP
        ):
            return XLA(x, weight)
        y = jax.ffi.ffi_call(
            _target(x.dtype.name, self.build),
            jax.ShapeDtypeStruct((num_rows, weight.shape[0]), jnp.float32),
        )(x.reshape(num_rows, -1), weight)
        return y.reshape(*x.shape[:-1], -1)


def load(directory: Path) -> NativeMatmul:
    """Load the library for this machine, which is built first unless it lies in the directory.

    Raises NotAvailableError.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NotAvailableError(f"no C++ compiler is here ({', '.join(_COMPILERS)})")
    try:
        build = _identity(compiler)
        library = _make_private(directory) / f"dense-{build}.so"
        if not library.exists():
            _compile(compiler, library)
        _check_ours(library)
        _register(library, build)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotAvailableError(_reason(error)) from error
    return NativeMatmul(build)


def _identity(compiler: str) -> str:
    """All that decides what the library is, hashed."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True, timeout=_SECONDS
    ).stdout
    facts = (
        _SOURCE.read_text(),
        *_FLAGS,
        version,
        importlib.metadata.version("jaxlib"),
        processor(),
    )
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


def _make_private(directory: Path) -> Path:
    """What is in the directory is run, so nobody else may write there."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_ours(directory)
    return directory


def _check_ours(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NotAvailableError(f"others may write {path}; make it yours alone")


def _compile(compiler: str, library: Path) -> None:
    """Whoever starts at the same time compiles, too: the last one stays, and they are alike."""
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        subprocess.run(
            [compiler, *_FLAGS, "-I", jax.ffi.include_dir(), str(_SOURCE), "-o", str(made)],
            capture_output=True,
            text=True,
            check=True,
            timeout=_SECONDS,
        )
        made.chmod(0o700)
        made.rename(library)


def _register(library: Path, build: str) -> None:
    """Tell XLA of it: once in a process, wherever the library lies."""
    if build in _registered:
        return
    functions = ctypes.cdll.LoadLibrary(str(library))
    for dtype, suffix in _TYPES.items():
        function = getattr(functions, f"jaxllm_dense_{suffix}")
        jax.ffi.register_ffi_target(
            _target(dtype, build), jax.ffi.pycapsule(function), platform="cpu"
        )
    _registered.add(build)


def _target(dtype: str, build: str) -> str:
    return f"jaxllm_dense_{_TYPES[dtype]}_{build}"


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stderr or "").strip().splitlines()
        return f"{error.cmd[0]} failed: {lines[0] if lines else error.returncode}"[:300]
    return str(error)[:300]
