"""Matrix products on CPU in C++. They beat XLA up to some hundred rows and skip padding."""

import math
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.coded import CodedWeight, CodeForm
from jaxllm_kernels.dense.api import XLA
from jaxllm_kernels.native.codes import buffers, held_natively
from jaxllm_kernels.native.library import Library
from jaxllm_kernels.platform import processor

# With more rows, XLA's products are faster if all rows are used (benchmarks/dense.py).
MAX_ROWS = {"float32": 256, "bfloat16": 512}
# The limit for bfloat16 on processors with AMX, which XLA's products use and ours do not.
MAX_ROWS_BESIDE_AMX = 128
# The most inputs that an accumulator takes at a time.
_STEP = 32


@dataclass(frozen=True)
class NativeMatmul:
    """`api.Matmul` by the native library. XLA computes what the library does not support."""

    library: Library
    # Whether the kernel computes every product, also where XLA's is faster: the order of its sums
    # is fixed, and that of XLA's depends on the number of rows.
    computes_all: bool = False
    # Whether it multiplies float32, too, if that is not one of the library's types.
    with_float32: bool = False

    @classmethod
    def load(cls, library: Library, *, with_float32: bool) -> "NativeMatmul":
        """Load what computes all products; raise ValueError, which says why, if it cannot be
        built."""
        if with_float32:
            library.add_products("float32")
        return cls(library, computes_all=True, with_float32=with_float32)

    def max_rows(self, dtype: DTypeLike) -> int:
        """The largest number of rows for the native kernel. It skips padding at the end: zeros, or
        rows that repeat the one before."""
        name = jnp.dtype(dtype).name
        if name not in self.library.dtypes and not (self.with_float32 and name == "float32"):
            return 0
        if self.computes_all:
            return sys.maxsize
        if name == "bfloat16" and "amx_bf16" in processor():
            return MAX_ROWS_BESIDE_AMX
        return MAX_ROWS[name]

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        num_rows = math.prod(x.shape[:-1])
        if self.computes_all:
            x, weight = _with_whole_steps(x, weight)
        if x.dtype != weight.dtype or num_rows > self.max_rows(x.dtype) or x.shape[-1] % _STEP:
            return XLA(x, weight)
        y = jax.ffi.ffi_call(
            self.library.target("jaxllm_dense", x.dtype),
            jax.ShapeDtypeStruct((num_rows, weight.shape[0]), jnp.float32),
        )(x.reshape(num_rows, x.shape[-1]), weight)
        return y.reshape(*x.shape[:-1], weight.shape[0])


def _with_whole_steps(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same product with a number of inputs that the kernel takes."""
    missing = -x.shape[-1] % _STEP
    if not missing:
        return x, weight
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing),)), jnp.pad(
        weight, ((0, 0), (0, missing))
    )


@dataclass(frozen=True)
class NativeCodedMatmul:
    """`api.CodedMatmul` by the native library, for any number of rows of its dtypes."""

    library: Library
    name: str = "native"

    def held(self, form: CodeForm, num_outputs: int, num_inputs: int) -> CodeForm:
        del num_outputs
        held = held_natively(form, num_inputs)
        self.library.add_codes("dense", form.codes)
        return held

    def __call__(self, x: jax.Array, weight: CodedWeight) -> jax.Array:
        num_outputs, num_inputs = weight.shape
        num_rows = math.prod(x.shape[:-1])
        y = jax.ffi.ffi_call(
            self.library.target_for_codes("dense", weight.form.codes, x.dtype),
            jax.ShapeDtypeStruct((num_rows, num_outputs), jnp.float32),
        )(x.reshape(num_rows, num_inputs), *buffers(weight))
        return y.reshape(*x.shape[:-1], num_outputs)
