"""The plainest way through the rows of a step: all tokens, one after the other. For tests only."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm_kernels.recurrent.rows import StateRows


def scan_tokens(
    step: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]],
    operands: Any,
    state: jax.Array,
    rows: StateRows,
    *,
    out_shape: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Like `scan.scan_rows`, with `step` for every token."""
    num_tokens = len(rows.token_rows)

    def run(carried: tuple[jax.Array, jax.Array], token: Any) -> tuple[Any, jax.Array]:
        states, state = carried
        index, its = token
        row = rows.token_rows[index]
        slot = jnp.where(index < rows.query_starts[-1], rows.slots[row], len(states))
        offset = rows.offsets[index]
        before = jnp.where(rows.begins[row], 0, states.at[slot].get(mode="fill", fill_value=0))
        state, y = step(jnp.where(offset == 0, before, state), its)
        y = jnp.where(index < rows.query_starts[-1], y, 0)
        kept = jnp.where(offset < rows.num_kept[row], slot, len(states))
        return (states.at[kept].set(state, mode="drop"), state), y

    carried = (state, jnp.zeros_like(state[0]))
    (state, _), out = jax.lax.scan(run, carried, (jnp.arange(num_tokens), operands))
    return out.reshape(num_tokens, *out_shape), state
