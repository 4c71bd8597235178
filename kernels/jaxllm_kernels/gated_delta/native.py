"""The gated delta rule on CPUs, in C++: all rows, or decodes and drafts beside tiles in XLA."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.gated_delta.xla import CHUNK
from jaxllm_kernels.native.library import Library
from jaxllm_kernels.recurrent.native import advance_rows
from jaxllm_kernels.recurrent.rows import StateRows
from jaxllm_kernels.recurrent.scan import scan_tiles


@dataclass(frozen=True)
class NativeDelta:
    """`api.DeltaOp` by the native library."""

    library: Library
    name: str = "native"
    # Whether every row is computed token by token: a tile adds up otherwise than its tokens one by
    # one, and where tiles begin depends on how a prompt is cut.
    by_token: bool = False

    @classmethod
    def load(cls, library: Library, *, by_token: bool = False) -> "NativeDelta":
        """Load the function; raise ValueError, which says why, if it cannot be built."""
        library.add_delta()
        return cls(library, by_token=by_token)

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        log_decay: jax.Array,
        beta: jax.Array,
        state: jax.Array,
        rows: StateRows,
    ) -> tuple[jax.Array, jax.Array]:
        tiled = (q, k, v, log_decay, beta)
        if self.by_token:
            out = jnp.zeros(v.shape, jnp.float32)
        else:
            out, state = scan_tiles(CHUNK, tiled, state, rows, out_shape=v.shape[1:])
        operands = (
            *(x.astype(jnp.float32) for x in (q, k, v)),
            log_decay.reshape(*beta.shape, -1),
            beta,
        )
        return advance_rows(
            self.library, "jaxllm_delta", operands, state, out, rows, all_rows=self.by_token
        )
