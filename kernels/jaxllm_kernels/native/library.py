"""The library of native kernels for CPUs, for operations where XLA is slow.

The machine that runs the library compiles it, for its own processor and the requested dtypes, with
any C++ compiler. The library is kept in a directory of the user. XLA calls it through its foreign
function interface. Products with each kind of codes, and attention over caches of each kind, are
parts of their own, which are made when they are asked for: few models need one, and compiling takes
seconds.
"""

import ctypes
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.platform import processor

_ROOT = Path(__file__).parents[1]
# Its sources, and their function for XLA: one for each dtype.
_HEADERS = (
    "native/coded_products.h", "native/codes.h", "native/matrices.h", "native/products.h",
    "native/rows.h", "native/threads.h", "native/vectors.h", "dense/multiply.h", "experts/layer.h",
    "ragged_paged_attention/native.h", "sampler/rows.h",
)  # fmt: skip
_FUNCTIONS = {
    "dense/native.cc": "jaxllm_dense",
    "experts/native.cc": "jaxllm_experts",
    "ragged_paged_attention/native.cc": "jaxllm_attention",
}
# The ops that have functions for codes, and C++'s names of these.
_CODED = {"dense": "dense/coded.cc", "experts": "experts/coded.cc"}
CODES = {
    "int8": "Int8", "float8_e4m3fn": "Float8", "int4": "Int4", "float4_e2m1fn": "Float4",
}  # fmt: skip
# Attention over caches of codes.
_CACHED = {
    "int8": ("ragged_paged_attention/native_int8.cc", "jaxllm_attention_int8"),
    "float8_e4m3fn": ("ragged_paged_attention/native_float8.cc", "jaxllm_attention_float8"),
}
# Adapters.
_LOW_RANK = {"low_rank/native.cc": "jaxllm_low_rank"}
# Sums in a fixed order.
_ROW_SUMS = {"row_sums/native.cc": "jaxllm_row_sums"}
# The choice of tokens, whose logits are float32.
_SAMPLER = {"sampler/native.cc": "jaxllm_sample", "sampler/record.cc": "jaxllm_record"}
_SUFFIXES = {"float32": "f32", "bfloat16": "bf16"}
DTYPES = tuple(_SUFFIXES)
KV_DTYPES = tuple(_CACHED)
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-w")
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 300  # on a machine that has much other work
_registered: set[str] = set()


class NotAvailableError(Exception):
    """The library cannot be used on this machine; the message says why."""


@dataclass(frozen=True)
class Library:
    """A library that is loaded and registered with XLA."""

    build: str  # hash of everything that determines the library
    dtypes: tuple[str, ...]  # for which it has functions
    # Where it is does not matter to programs, which may be found by what a library says of itself.
    _directory: Path = field(compare=False, repr=False)
    _compiler: str = field(compare=False, repr=False)
    _flags: tuple[str, ...] = field(compare=False, repr=False)
    kv_dtypes: tuple[str, ...] = ()  # the codes of caches for which there is attention

    def target(self, function: str, dtype: DTypeLike) -> str:
        """The name by which XLA knows one of its functions."""
        return f"{_symbol(function, jnp.dtype(dtype).name)}_{self.build}"

    def attention(self, dtype: DTypeLike, kv_dtype: str | None) -> str:
        """The name by which XLA knows the attention over a cache."""
        function = "jaxllm_attention" if kv_dtype is None else _CACHED[kv_dtype][1]
        return self.target(function, dtype)

    def target_for_codes(self, op: str, codes: str, dtype: DTypeLike) -> str:
        """As `target`, of the function of an op for codes, which `add_codes` has loaded."""
        return self.target(f"jaxllm_{op}_{CODES[codes]}", dtype)

    def add_codes(self, op: str, codes: str) -> None:
        """Load the functions of an op, dense or experts, for these codes. Raises ValueError, which
        says why, if there are none."""
        if codes not in CODES:
            raise ValueError(f"codes of type {codes} are not {', '.join(CODES)}")
        name = CODES[codes]
        self._add(f"{op}-{codes}", {_CODED[op]: f"jaxllm_{op}_{name}"}, f"-DJAXLLM_CODES={name}")

    def add_low_rank(self) -> None:
        """Load the low-rank products. Raises ValueError, which says why, if there are none."""
        self._add("low-rank", _LOW_RANK)

    def add_row_sums(self) -> None:
        """Load the sums in a fixed order. Raises ValueError, which says why, if there are none."""
        self._add("row-sums", _ROW_SUMS)

    def add_sampler(self) -> None:
        """Load the sampler. Raises ValueError, which says why, if there is none."""
        self._add("sampler", _SAMPLER, dtypes=("float32",))

    def _add(
        self,
        part: str,
        functions: Mapping[str, str],
        *defines: str,
        dtypes: tuple[str, ...] | None = None,
    ) -> None:
        try:
            self._load(part, functions, *defines, dtypes=dtypes)
        except (NotAvailableError, OSError, subprocess.SubprocessError) as error:
            raise ValueError(_reason(error)) from error

    def _load(
        self,
        part: str,
        functions: Mapping[str, str],
        *defines: str,
        dtypes: tuple[str, ...] | None = None,
    ) -> None:
        """Load a part that has these sources and functions, for these dtypes (default: those of the
        library). Build it first unless the directory has it."""
        dtypes = self.dtypes if dtypes is None else dtypes
        path = self._directory / f"{part}-{self.build}.so"
        if not path.exists():
            wanted = [f"-DJAXLLM_{dtype.upper()}" for dtype in dtypes]
            _compile(self._compiler, (*self._flags, *wanted, *defines), functions, path)
        _check_ours(path)
        if path.name in _registered:  # once per process, independent of its directory
            return
        loaded = ctypes.cdll.LoadLibrary(str(path))
        for name in functions.values():
            for dtype in dtypes:
                function = jax.ffi.pycapsule(getattr(loaded, _symbol(name, dtype)))
                jax.ffi.register_ffi_target(self.target(name, dtype), function, platform="cpu")
        _registered.add(path.name)


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
    build = _identity(compiler, dtypes)
    library = Library(build, dtypes, _make_private(directory), compiler, _FLAGS, kv_dtypes)
    library._load("kernels", _FUNCTIONS)
    for kv_dtype in kv_dtypes:
        source, function = _CACHED[kv_dtype]
        library._load(f"attention-{kv_dtype}", {source: function})
    return library


def _identity(compiler: str, dtypes: tuple[str, ...]) -> str:
    """A hash of everything that determines the library."""
    facts = (
        *((_ROOT / name).read_text() for name in _sources()),
        *_FLAGS,
        *dtypes,
        _run(compiler, "--version"),
        importlib.metadata.version("jaxlib"),
        processor(),
    )
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


def _sources() -> tuple[str, ...]:
    cached = (source for source, _ in _CACHED.values())
    return (*_HEADERS, *_FUNCTIONS, *_CODED.values(), *cached, *_LOW_RANK, *_ROW_SUMS, *_SAMPLER)


def _make_private(directory: Path) -> Path:
    """Make a directory where nobody else may write, because its contents are executed."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_ours(directory)
    return directory


def _check_ours(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NotAvailableError(f"others may write {path}; make it yours alone")


def _compile(compiler: str, flags: tuple[str, ...], sources: Collection[str], path: Path) -> None:
    """Compile a part. Concurrent processes may all do so: the results are equal, and the last one
    replaces the others."""
    includes = ("-I", jax.ffi.include_dir(), "-I", str(_ROOT))
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch, ThreadPoolExecutor() as pool:

        def compile_one(source: str) -> str:
            made = str(Path(scratch) / source.replace("/", "-")) + ".o"
            _run(compiler, *flags, *includes, "-c", str(_ROOT / source), "-o", made)
            return made

        objects = pool.map(compile_one, sources)
        made = Path(scratch) / path.name
        _run(compiler, *flags, "-shared", *objects, "-o", str(made))
        made.chmod(0o700)
        made.rename(path)


def _run(*command: str) -> str:
    """Return the output of a command."""
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=_SECONDS
    ).stdout


def _symbol(function: str, dtype: str) -> str:
    return f"{function}_{_SUFFIXES[dtype]}"


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stderr or "").strip().splitlines()
        return f"{error.cmd[0]} failed: {lines[0] if lines else error.returncode}"[:300]
    return str(error)[:300]
