"""The library of native kernels for CPUs, for operations where XLA is slow.

The machine that runs the library compiles it, for its own processor and the requested dtypes, with
any C++ compiler. The library is kept in a directory of the user. XLA calls it through its foreign
function interface.
"""

import ctypes
import hashlib
import importlib.metadata
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.platform import processor

_ROOT = Path(__file__).parents[1]
# Its sources, and their functions for XLA: one of each for each dtype.
_HEADERS = (
    "native/codes.h",
    "native/products.h",
    "native/threads.h",
    "native/vectors.h",
    "ragged_paged_attention/native.h",
)
_FUNCTIONS = {
    "dense/native.cc": ("jaxllm_dense", "jaxllm_dense_int8", "jaxllm_dense_float8"),
    "experts/native.cc": ("jaxllm_experts",),
    "ragged_paged_attention/native.cc": ("jaxllm_attention",),
}
# Attention over caches of codes, in libraries of their own: each takes as long to compile as all
# dense products, and only engines that have such a cache need it.
_OF_CODES = {
    "int8": ("ragged_paged_attention/native_int8.cc", "jaxllm_attention_int8"),
    "float8_e4m3fn": ("ragged_paged_attention/native_float8.cc", "jaxllm_attention_float8"),
}
_SUFFIXES = {"float32": "f32", "bfloat16": "bf16"}
DTYPES = tuple(_SUFFIXES)
KV_DTYPES = tuple(_OF_CODES)
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-w")
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 300  # on a machine that has much other work
_registered: set[str] = set()


class NotAvailableError(Exception):
    """The library cannot be used on this machine; the message says why."""


@dataclass(frozen=True)
class Library:
    """Libraries that are loaded and registered with XLA."""

    build: str  # hash of everything that determines the library
    dtypes: tuple[str, ...]  # for which it has functions
    # The codes of caches for which there is attention, and the build of its library.
    of_codes: tuple[tuple[str, str], ...] = ()

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        return tuple(kv_dtype for kv_dtype, _ in self.of_codes)

    def target(self, function: str, dtype: DTypeLike) -> str:
        """The name by which XLA knows one of its functions."""
        return _target(function, jnp.dtype(dtype).name, self.build)

    def attention(self, dtype: DTypeLike, kv_dtype: str | None) -> str:
        """The name by which XLA knows the attention over a cache."""
        if kv_dtype is None:
            return self.target("jaxllm_attention", dtype)
        _, function = _OF_CODES[kv_dtype]
        return _target(function, jnp.dtype(dtype).name, dict(self.of_codes)[kv_dtype])


@dataclass(frozen=True)
class NoLibrary:
    """The library is not available."""

    reason: str


def load(
    directory: Path, dtypes: tuple[str, ...] = DTYPES, kv_dtypes: tuple[str, ...] = ()
) -> Library | NoLibrary:
    """Load the library for this machine. Build it first unless the directory has it."""
    try:
        return _load(directory, dtypes, kv_dtypes)
    except (NotAvailableError, OSError, subprocess.SubprocessError) as error:
        return NoLibrary(_reason(error))


def _load(directory: Path, dtypes: tuple[str, ...], kv_dtypes: tuple[str, ...]) -> Library:
    others = [dtype for dtype in dtypes if dtype not in DTYPES]
    if others:
        raise NotAvailableError(f"they are for {' and '.join(DTYPES)}, and this is {others[0]}")
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NotAvailableError(f"no C++ compiler is here ({', '.join(_COMPILERS)})")
    _make_private(directory)

    def load_one(functions: Mapping[str, tuple[str, ...]]) -> str:
        build = _identity(compiler, dtypes, functions)
        path = directory / f"kernels-{build}.so"
        if not path.exists():
            _compile(compiler, dtypes, functions, path)
        _check_ours(path)
        _register(path, build, dtypes, functions)
        return build

    of_codes = {kv_dtype: _OF_CODES[kv_dtype] for kv_dtype in kv_dtypes}
    return Library(
        load_one(_FUNCTIONS),
        dtypes,
        tuple(
            (name, load_one({source: (function,)})) for name, (source, function) in of_codes.items()
        ),
    )


def _identity(
    compiler: str, dtypes: tuple[str, ...], functions: Mapping[str, tuple[str, ...]]
) -> str:
    """A hash of everything that determines a library."""
    facts = (
        *((_ROOT / name).read_text() for name in (*_HEADERS, *functions)),
        *_FLAGS,
        *dtypes,
        _run(compiler, "--version"),
        importlib.metadata.version("jaxlib"),
        processor(),
    )
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


def _make_private(directory: Path) -> None:
    """Make a directory where nobody else may write, because its contents are executed."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_ours(directory)


def _check_ours(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NotAvailableError(f"others may write {path}; make it yours alone")


def _compile(
    compiler: str, dtypes: tuple[str, ...], functions: Mapping[str, tuple[str, ...]], path: Path
) -> None:
    """Compile a library. Concurrent processes may all do so: the results are equal, and the last
    one replaces the others."""
    includes = ("-I", jax.ffi.include_dir(), "-I", str(_ROOT))
    wanted = [f"-DJAXLLM_{dtype.upper()}" for dtype in dtypes]
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch, ThreadPoolExecutor() as pool:

        def compile_one(source: str) -> str:
            made = str(Path(scratch) / source.replace("/", "-")) + ".o"
            _run(compiler, *_FLAGS, *wanted, *includes, "-c", str(_ROOT / source), "-o", made)
            return made

        objects = pool.map(compile_one, functions)
        made = Path(scratch) / path.name
        _run(compiler, *_FLAGS, "-shared", *objects, "-o", str(made))
        made.chmod(0o700)
        made.rename(path)


def _run(*command: str) -> str:
    """Return the output of a command."""
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=_SECONDS
    ).stdout


def _register(
    path: Path, build: str, dtypes: tuple[str, ...], functions: Mapping[str, tuple[str, ...]]
) -> None:
    """Register a library with XLA, once per process, independent of its path."""
    if build in _registered:
        return
    loaded = ctypes.cdll.LoadLibrary(str(path))
    for name in itertools.chain(*functions.values()):
        for dtype in dtypes:
            function = jax.ffi.pycapsule(getattr(loaded, _symbol(name, dtype)))
            jax.ffi.register_ffi_target(_target(name, dtype, build), function, platform="cpu")
    _registered.add(build)


def _symbol(function: str, dtype: str) -> str:
    return f"{function}_{_SUFFIXES[dtype]}"


def _target(function: str, dtype: str, build: str) -> str:
    return f"{_symbol(function, dtype)}_{build}"


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stderr or "").strip().splitlines()
        return f"{error.cmd[0]} failed: {lines[0] if lines else error.returncode}"[:300]
    return str(error)[:300]
