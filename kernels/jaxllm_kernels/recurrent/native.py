"""Calls the functions in C++ that compute the rows of a step on CPUs, token by token."""

import jax
import jax.numpy as jnp

from jaxllm_kernels.native.library import Library
from jaxllm_kernels.recurrent.rows import StateRows


def advance_rows(
    library: Library,
    function: str,
    operands: tuple[jax.Array, ...],
    state: jax.Array,
    rows: StateRows,
    *,
    out_shape: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Compute all rows; return the outputs, float32 [T, *out_shape], and the states.

    Args:
      function: its name in the library. Its operands are all float32.
    """
    call = jax.ffi.ffi_call(
        library.target(function, jnp.float32),
        (
            jax.ShapeDtypeStruct(state.shape, state.dtype),
            jax.ShapeDtypeStruct((len(rows.token_rows), *out_shape), jnp.float32),
        ),
        input_output_aliases={len(operands): 0},
    )
    state, out = call(
        *operands,
        state,
        rows.slots,
        rows.query_starts,
        rows.lengths,
        rows.num_kept,
        rows.begins,
    )
    return out, state
