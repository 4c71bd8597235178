"""Matrix products on CPU in C++. They beat XLA up to some hundred rows and skip padding."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.dense.api import XLA, XLA_SCALED
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
class NativeScaledMatmul:
    """`api.ScaledMatmul` by the native library, for any number of rows: XLA would write the weights
    in x's dtype first. XLA computes what the library does not support."""

    library: Library

    def __call__(self, x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
        function, num_inputs = _CODES.get(codes.dtype.name), codes.shape[1]
        is_for = x.dtype.name in self.library.dtypes and function is not None
        if not is_for or num_inputs % (scales.shape[1] * _STEP):
            return XLA_SCALED(x, codes, scales)
        assert function is not None
        num_rows = math.prod(x.shape[:-1])
        y = jax.ffi.ffi_call(
            self.library.target(function, x.dtype),
            jax.ShapeDtypeStruct((num_rows, len(codes)), jnp.float32),
        )(x.reshape(num_rows, num_inputs), codes, scales)
        return y.reshape(*x.shape[:-1], len(codes))
