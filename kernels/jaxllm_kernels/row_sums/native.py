"""Sums of rows on CPU in C++."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.native.library import Library


@dataclass(frozen=True)
class NativeRowSums:
    """`api.RowSums` by the native library."""

    library: Library

    @classmethod
    def load(cls, library: Library) -> "NativeRowSums":
        """Load the function; raise ValueError, which says why, if it cannot be built."""
        library.add_row_sums()
        return cls(library)

    def total(self, x: jax.Array) -> jax.Array:
        return self._call(x, of_squares=False)

    def squares(self, x: jax.Array) -> jax.Array:
        return self._call(x, of_squares=True)

    def _call(self, x: jax.Array, *, of_squares: bool) -> jax.Array:
        if x.dtype.name not in self.library.dtypes:  # there is always one for float32
            x = x.astype(jnp.float32)
        num_rows = math.prod(x.shape[:-1])
        sums = jax.ffi.ffi_call(
            self.library.target("jaxllm_row_sums", x.dtype),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        )(x.reshape(num_rows, x.shape[-1]), of_squares=of_squares)
        return sums.reshape(x.shape[:-1])
