"""Calls the functions in C++ that compute decodes and rows with drafts on CPUs."""

import jax
import jax.numpy as jnp

from jaxllm_kernels.native.library import Library
from jaxllm_kernels.recurrent.rows import StateRows


def advance_rows(
    library: Library,
    function: str,
    operands: tuple[jax.Array, ...],
    state: jax.Array,
    out: jax.Array,
    rows: StateRows,
    *,
    all_rows: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute the decodes and the rows with drafts; return the outputs and states of all rows.

    Args:
      function: its name in the library. Its operands are all float32.
      state, out: what `scan.scan_tiles` returns, whose rows are left as they are. The tiles come
        first because they also write behind their tokens.
      all_rows: whether there were no tiles, and all rows are computed, token by token.
    """
    num_decodes = rows.num_decodes
    num_drafting, drafting = jnp.int32(0), jnp.zeros(0, jnp.int32)
    if rows.drafts is not None:
        num_drafting, drafting = rows.drafts.num_rows, rows.drafts.rows
    if all_rows:
        # Rows without tokens have no slot, and are skipped.
        num_rows = len(rows.slots)
        num_decodes, num_drafting = jnp.int32(0), jnp.int32(num_rows)
        drafting = jnp.arange(num_rows, dtype=jnp.int32)
    place = len(operands)
    call = jax.ffi.ffi_call(
        library.target(function, jnp.float32),
        (
            jax.ShapeDtypeStruct(state.shape, state.dtype),
            jax.ShapeDtypeStruct(out.shape, out.dtype),
        ),
        input_output_aliases={place: 0, place + 1: 1},
    )
    state, out = call(
        *operands,
        state,
        out,
        rows.slots,
        rows.query_starts,
        rows.lengths,
        rows.num_kept,
        drafting,
        jnp.stack([num_decodes, num_drafting]),
        rows.begins,
    )
    return out[: len(rows.token_rows)], state
