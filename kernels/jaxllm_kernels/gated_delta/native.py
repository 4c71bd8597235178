"""The gated delta rule on CPUs, in C++: all rows, or decodes and drafts beside tiles in XLA."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.gated_delta.xla import advance_tile
from jaxllm_kernels.native.library import Library
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
        if self.by_token:
            out = jnp.zeros(v.shape, jnp.float32)
            # Rows without tokens have no slot, and are skipped.
            drafting = jnp.arange(len(rows.slots), dtype=jnp.int32)
            counts = jnp.array([0, len(drafting)], jnp.int32)
        else:
            operands = (q, k, v, log_decay, beta)
            # The tiles come first: they also write behind their tokens.
            out, state = scan_tiles(advance_tile, operands, state, rows, out_shape=v.shape[1:])
            num_drafting, drafting = jnp.int32(0), jnp.zeros(0, jnp.int32)
            if rows.drafts is not None:
                num_drafting, drafting = rows.drafts.num_rows, rows.drafts.rows
            counts = jnp.stack([rows.num_decodes, num_drafting])
        call = jax.ffi.ffi_call(
            self.library.target("jaxllm_delta", jnp.float32),
            (
                jax.ShapeDtypeStruct(state.shape, state.dtype),
                jax.ShapeDtypeStruct(out.shape, out.dtype),
            ),
            input_output_aliases={5: 0, 6: 1},
        )
        state, out = call(
            *(x.astype(jnp.float32) for x in (q, k, v)),
            log_decay.reshape(*beta.shape, -1),
            beta,
            state,
            out,
            rows.slots,
            rows.begins,
            rows.query_starts,
            rows.lengths,
            rows.num_kept,
            drafting,
            counts,
        )
        return out[: len(v)], state
