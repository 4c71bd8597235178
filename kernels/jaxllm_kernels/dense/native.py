"""The product on a CPU, in C++: for the few rows of decodes, where XLA reads weights slowly."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.dense.api import XLA
from jaxllm_kernels.native.library import Library

# Above it, XLA's products of blocks are as good (benchmarks/dense.py).
MAX_ROWS = {"float32": 32, "bfloat16": 128}
# What an accumulator takes at a time, at most.
_STEP = 32


@dataclass(frozen=True)
class NativeMatmul:
    """`api.Matmul` through the library; what it is not made for goes to XLA."""

    library: Library

    def max_rows(self, dtype: DTypeLike) -> int:
        """Up to how many rows are its own; of those it skips zeros at the end."""
        name = jnp.dtype(dtype).name
        return MAX_ROWS[name] if name in self.library.dtypes else 0

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        num_rows = math.prod(x.shape[:-1])
        if x.dtype != weight.dtype or num_rows > self.max_rows(x.dtype) or x.shape[-1] % _STEP:
            return XLA(x, weight)
        y = jax.ffi.ffi_call(
            self.library.target("jaxllm_dense", x.dtype),
            jax.ShapeDtypeStruct((num_rows, weight.shape[0]), jnp.float32),
        )(x.reshape(num_rows, -1), weight)
        return y.reshape(*x.shape[:-1], -1)
