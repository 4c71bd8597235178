"""Matrix products on CPU in C++. They beat XLA up to some hundred rows and skip padding."""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.coded import CodedWeight, CodeForm
from jaxllm_kernels.dense.api import XLA
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

    def max_rows(self, dtype: DTypeLike) -> int:
        """The largest number of rows for the native kernel. It skips zero rows at the end."""
        name = jnp.dtype(dtype).name
        if name not in self.library.dtypes:
            return 0
        if name == "bfloat16" and "amx_bf16" in processor():
            return MAX_ROWS_BESIDE_AMX
        return MAX_ROWS[name]

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        num_rows = math.prod(x.shape[:-1])
        if x.dtype != weight.dtype or num_rows > self.max_rows(x.dtype) or x.shape[-1] % _STEP:
            return XLA(x, weight)
        y = jax.ffi.ffi_call(
            self.library.target("jaxllm_dense", x.dtype),
            jax.ShapeDtypeStruct((num_rows, weight.shape[0]), jnp.float32),
        )(x.reshape(num_rows, x.shape[-1]), weight)
        return y.reshape(*x.shape[:-1], weight.shape[0])


_CODES = {"int8": "jaxllm_dense_int8", "float8_e4m3fn": "jaxllm_dense_float8"}


@dataclass(frozen=True)
class NativeCodedMatmul:
    """`api.CodedMatmul` by the native library, for any number of rows of its dtypes."""

    library: Library
    name: str = "native"

    def held(self, form: CodeForm, num_outputs: int, num_inputs: int) -> CodeForm:
        del num_outputs
        if form.codes not in _CODES:
            raise ValueError(f"codes of type {form.codes} are not {' or '.join(_CODES)}")
        if form.has_offsets:
            raise ValueError("weights have offsets")
        group = form.group or num_inputs
        if group % _STEP or num_inputs % group:
            raise ValueError(f"{group} inputs with one scale are not a multiple of {_STEP}")
        return replace(form, scale_dtype="float32")

    def __call__(self, x: jax.Array, weight: CodedWeight) -> jax.Array:
        num_outputs, num_inputs = weight.shape
        num_rows = math.prod(x.shape[:-1])
        y = jax.ffi.ffi_call(
            self.library.target(_CODES[weight.form.codes], x.dtype),
            jax.ShapeDtypeStruct((num_rows, num_outputs), jnp.float32),
        )(x.reshape(num_rows, num_inputs), weight.codes, weight.scales)
        return y.reshape(*x.shape[:-1], num_outputs)
