"""The library of native kernels for CPUs, for operations where XLA is slow.

The machine that runs the library compiles it, for its own processor, with any C++ compiler. The
library is kept in a directory of the user. XLA calls it through its foreign function interface. It
is in parts, each of one source and one dtype: products and attention are in every library, and the
others are made when they are asked for: few models need one, and compiling takes seconds.
"""

import ctypes
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.platform import processor

_ROOT = Path(__file__).parents[1]
_HEADERS = (
    "native/coded_products.h", "native/codes.h", "native/ffi.h", "native/matrices.h",
    "native/padding.h", "native/products.h", "native/rows.h", "native/threads.h",
    "native/vectors.h", "dense/multiply.h", "experts/layer.h",
    "ragged_paged_attention/native.h", "recurrent/native.h", "sampler/record.h", "sampler/rows.h",
)  # fmt: skip
# The C++ names of codes.
CODES = {
    "int8": "Int8", "float8_e4m3fn": "Float8", "int4": "Int4", "float4_e2m1fn": "Float4",
}  # fmt: skip


@dataclass(frozen=True)
class _Part:
    """A source, and its functions for XLA: one of each for each dtype."""

    name: str
    source: str
    functions: tuple[str, ...]
    define: str | None = None
    dtypes: tuple[str, ...] | None = None  # default: those of the library
    also: tuple[str, ...] = ()  # beside those of the library


_DENSE = _Part("dense", "dense/native.cc", ("jaxllm_dense",))
_ATTENTION = _Part("attention", "ragged_paged_attention/native.cc", ("jaxllm_attention",))
# Attention over caches of codes.
_CACHED = {
    "int8": _Part(
        "attention-int8", "ragged_paged_attention/native_int8.cc", ("jaxllm_attention_int8",)
    ),
    "float8_e4m3fn": _Part(
        "attention-float8", "ragged_paged_attention/native_float8.cc", ("jaxllm_attention_float8",)
    ),
}
# Dense products and experts with weights of codes.
_CODED = {
    (op, codes): _Part(
        f"{op}-{codes}", f"{op}/coded.cc", (f"jaxllm_{op}_{name}",), f"-DJAXLLM_CODES={name}"
    )
    for op in ("dense", "experts")
    for codes, name in CODES.items()
}
# Attention to latents.
_LATENTS = _Part("latents", "mla/native.cc", ("jaxllm_latents",))
# Matrices of heads, which make keys and values of latents.
_HEAD_PRODUCTS = _Part(
    "head-products",
    "head_products/native.cc",
    ("jaxllm_heads_times", "jaxllm_heads_times_transposed"),
)
_EXPERTS = _Part("experts", "experts/native.cc", ("jaxllm_experts",))
# Adapters.
_LOW_RANK = _Part("low-rank", "low_rank/native.cc", ("jaxllm_low_rank",))
# Short convolutions, and layers with a matrix for each head, which are computed in float32.
_CONV = _Part("conv", "causal_conv/native.cc", ("jaxllm_conv",))
_DELTA = _Part("delta", "gated_delta/native.cc", ("jaxllm_delta",), dtypes=("float32",))
_SSD = _Part("ssd", "ssd/native.cc", ("jaxllm_ssd",), dtypes=("float32",))
# Attention to whole texts and images, in encoders and towers.
_SELF_ATTENTION = _Part(
    "self-attention", "ragged_self_attention/native.cc", ("jaxllm_self_attention",)
)
# Sums in a fixed order. Much of what is added up is float32 in every model.
_ROW_SUMS = _Part("row-sums", "row_sums/native.cc", ("jaxllm_row_sums",), also=("float32",))
# The choice of tokens, whose logits are float32.
_SAMPLER = _Part(
    "sampler",
    "sampler/native.cc",
    ("jaxllm_sample", "jaxllm_logprobs", "jaxllm_record"),
    dtypes=("float32",),
)
_PARTS = (
    _DENSE, _ATTENTION, *_CACHED.values(), *_CODED.values(), _CONV, _DELTA, _EXPERTS,
    _HEAD_PRODUCTS, _LATENTS, _LOW_RANK, _ROW_SUMS, _SAMPLER, _SELF_ATTENTION, _SSD,
)  # fmt: skip
_BASE = (_DENSE, _ATTENTION)  # what every library has
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

    build: str  # hash of everything that determines what is built for each dtype
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
        part = _ATTENTION if kv_dtype is None else _CACHED[kv_dtype]
        return self.target(part.functions[0], dtype)

    def target_for_codes(self, op: str, codes: str, dtype: DTypeLike) -> str:
        """As `target`, of the function of an op for codes, which `add_codes` has loaded."""
        return self.target(f"jaxllm_{op}_{CODES[codes]}", dtype)

    def add_codes(self, op: str, codes: str) -> None:
        """Load the functions of an op, dense or experts, for these codes. Raises ValueError, which
        says why, if there are none."""
        if codes not in CODES:
            raise ValueError(f"codes of type {codes} are not {', '.join(CODES)}")
        self._add(_CODED[op, codes])

    def add_conv(self) -> None:
        """Load the short convolution. Raises ValueError, which says why, if there is none."""
        self._add(_CONV)

    def add_delta(self) -> None:
        """Load the gated delta rule. Raises ValueError, which says why, if there is none."""
        self._add(_DELTA)

    def add_experts(self) -> None:
        """Load the experts. Raises ValueError, which says why, if there are none."""
        self._add(_EXPERTS)

    def add_head_products(self) -> None:
        """Load the products of heads. Raises ValueError, which says why, if there are none."""
        self._add(_HEAD_PRODUCTS)

    def add_latents(self) -> None:
        """Load the attention to latents. Raises ValueError, which says why, if there is none."""
        self._add(_LATENTS)

    def add_low_rank(self) -> None:
        """Load the low-rank products. Raises ValueError, which says why, if there are none."""
        self._add(_LOW_RANK)

    def add_products(self, dtype: str) -> None:
        """Load the dense products of another dtype. Raises ValueError, which says why, if there are
        none."""
        self._add(replace(_DENSE, dtypes=(dtype,)))

    def add_row_sums(self) -> None:
        """Load the sums in a fixed order. Raises ValueError, which says why, if there are none."""
        self._add(_ROW_SUMS)

    def add_sampler(self) -> None:
        """Load the sampler. Raises ValueError, which says why, if there is none."""
        self._add(_SAMPLER)

    def add_self_attention(self) -> None:
        """Load attention to whole texts. Raises ValueError, which says why, if there is none."""
        self._add(_SELF_ATTENTION)

    def add_ssd(self) -> None:
        """Load the state space of Mamba2. Raises ValueError, which says why, if there is none."""
        self._add(_SSD)

    def _add(self, part: _Part) -> None:
        try:
            self._load(part)
        except (NotAvailableError, OSError, subprocess.SubprocessError) as error:
            raise ValueError(_reason(error)) from error

    def _load(self, part: _Part) -> None:
        """Load a part. Build it first unless the directory has it."""
        self._build([part])
        for dtype in self._dtypes_of(part):
            path = self._path(part, dtype)
            _check_ours(path)
            if path.name in _registered:  # once per process, independent of its directory
                continue
            loaded = ctypes.cdll.LoadLibrary(str(path))
            for name in part.functions:
                function = jax.ffi.pycapsule(getattr(loaded, _symbol(name, dtype)))
                jax.ffi.register_ffi_target(self.target(name, dtype), function, platform="cpu")
            _registered.add(path.name)

    def _build(self, parts: Iterable[_Part]) -> None:
        """Build what the directory does not have of these parts, all at the same time."""
        missing = [
            (part, dtype)
            for part in parts
            for dtype in self._dtypes_of(part)
            if not self._path(part, dtype).exists()
        ]
        if missing:
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda one: self._compile(*one), missing))

    def _dtypes_of(self, part: _Part) -> Iterable[str]:
        return dict.fromkeys((*(part.dtypes or self.dtypes), *part.also))

    def _path(self, part: _Part, dtype: str) -> Path:
        return self._directory / f"{part.name}-{dtype}-{self.build}.so"

    def _compile(self, part: _Part, dtype: str) -> None:
        """Compile a part. Concurrent processes may all do so: the results are equal, and the last
        one replaces the others."""
        path = self._path(part, dtype)
        flags = (*self._flags, f"-DJAXLLM_{dtype.upper()}", *filter(None, [part.define]))
        includes = ("-I", jax.ffi.include_dir(), "-I", str(_ROOT))
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / path.name
            source = str(_ROOT / part.source)
            _run(self._compiler, *flags, *includes, "-shared", source, "-o", str(made))
            made.chmod(0o700)
            made.rename(path)


@dataclass(frozen=True)
class NoLibrary:
    """The library is not available."""

    reason: str


def load(
    directory: Path,
    dtypes: tuple[str, ...] = DTYPES,
    kv_dtypes: tuple[str, ...] = (),
    *,
    with_sampler: bool = False,
) -> Library | NoLibrary:
    """Load the library for this machine. Build it first unless the directory has it, and the
    sampler at the same time if it will be added."""
    try:
        return _load(directory, dtypes, kv_dtypes, with_sampler)
    except (NotAvailableError, OSError, subprocess.SubprocessError) as error:
        return NoLibrary(_reason(error))


def _load(
    directory: Path, dtypes: tuple[str, ...], kv_dtypes: tuple[str, ...], with_sampler: bool
) -> Library:
    others = [dtype for dtype in dtypes if dtype not in DTYPES]
    if others:
        raise NotAvailableError(f"they are for {' and '.join(DTYPES)}, and this is {others[0]}")
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NotAvailableError(f"no C++ compiler is here ({', '.join(_COMPILERS)})")
    build = _identity(compiler)
    library = Library(build, dtypes, _make_private(directory), compiler, _FLAGS, kv_dtypes)
    parts = (*_BASE, *(_CACHED[kv_dtype] for kv_dtype in kv_dtypes))
    with ThreadPoolExecutor() as pool:
        if with_sampler:  # if it cannot be built, `add_sampler` will say so
            pool.submit(library._build, [_SAMPLER])
        library._build(parts)
    for part in parts:
        library._load(part)
    return library


def sources() -> list[str]:
    """The files that all parts are built of, in the order of the identity."""
    return [*_HEADERS, *sorted({part.source for part in _PARTS})]


def _identity(compiler: str) -> str:
    """A hash of everything that determines what is built for each dtype."""
    facts = (
        *((_ROOT / name).read_text() for name in sources()),
        *_FLAGS,
        _run(compiler, "--version"),
        importlib.metadata.version("jaxlib"),
        processor(),
    )
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


def _make_private(directory: Path) -> Path:
    """Make a directory where nobody else may write, because its contents are executed."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_ours(directory)
    return directory


def _check_ours(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NotAvailableError(f"others may write {path}; make it yours alone")


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
