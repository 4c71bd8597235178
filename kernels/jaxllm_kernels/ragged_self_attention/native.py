"""Ragged self-attention on CPU in C++, for the library's dtypes."""

from dataclasses import dataclass

import jax
import numpy as np

from jaxllm_kernels.native.library import Library
from jaxllm_kernels.ragged_self_attention.api import SelfAttentionConfig


@dataclass(frozen=True)
class NativeSelfAttention:
    """`api.SelfAttentionOp` by the native library. A row's result does not depend on the others."""

    library: Library
    name: str = "native"

    @classmethod
    def load(cls, library: Library) -> "NativeSelfAttention":
        """Load the function; raise ValueError, which says why, if it cannot be built."""
        library.add_self_attention()
        return cls(library)

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        query_starts: jax.Array,
        config: SelfAttentionConfig,
        query_ends: jax.Array | None = None,
    ) -> jax.Array:
        attend = jax.ffi.ffi_call(
            self.library.target("jaxllm_self_attention", q.dtype),
            jax.ShapeDtypeStruct((*q.shape[:2], v.shape[2]), q.dtype),
        )
        reach = -1 if config.reach is None else config.reach
        return attend(
            q,
            k,
            v,
            query_starts,
            query_starts[1:] if query_ends is None else query_ends,
            scale=np.float32(config.scale),
            reach=np.int64(reach),
            causal=config.causal,
        )
