"""Low-rank products on CPU in C++: the work of each token is that of its own adapter."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.low_rank.api import LowRank
from jaxllm_kernels.low_rank.xla import XlaLowRank
from jaxllm_kernels.native.library import Library

# The most inputs, and the most outputs, that are multiplied at a time.
_STEP, _COLUMNS = 32, 16


@dataclass(frozen=True)
class NativeLowRank:
    """`api.LowRankOp` by the native library. XLA computes what the library does not support."""

    library: Library

    @classmethod
    def load(cls, library: Library) -> "NativeLowRank":
        """Load the function; raise ValueError, which says why, if it cannot be built."""
        library.add_low_rank()
        return cls(library)

    def __call__(self, x: jax.Array, weights: LowRank, slots: jax.Array) -> jax.Array:
        columns = [b.shape[-1] for b in weights.b]
        is_whole = all(b.shape[2] == 1 for b in weights.b)
        fits = x.shape[-1] % _STEP == 0 and not any(its % _COLUMNS for its in columns)
        if not (is_whole and fits and x.dtype == weights.a.dtype):
            return XlaLowRank()(x, weights, slots)
        return jax.ffi.ffi_call(
            self.library.target("jaxllm_low_rank", x.dtype),
            jax.ShapeDtypeStruct((len(x), sum(columns)), jnp.float32),
        )(x, slots, weights.a, *weights.b)
