"""The gated delta rule on CPUs: decodes and rows with drafts in C++, tiles in XLA."""

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

    @classmethod
    def load(cls, library: Library) -> "NativeDelta":
        """Load the function; raise ValueError, which says why, if it cannot be built."""
        library.add_delta()
        return cls(library)

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
        operands = (q, k, v, log_decay, beta)
        # The tiles come first: they also write behind their tokens.
        out, state = scan_tiles(advance_tile, operands, state, rows, out_shape=v.shape[1:])
        num_drafting, drafting = jnp.int32(0), jnp.zeros(0, jnp.int32)
        if rows.drafts is not None:
            num_drafting, drafting = rows.drafts.num_rows, rows.drafts.rows
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
            jnp.stack([rows.num_decodes, num_drafting]),
        )
        return out[: len(v)], state
