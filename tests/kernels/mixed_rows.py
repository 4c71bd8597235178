"""A step of rows of several tokens that kernels of recurrent layers compute as XLA does."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch
from jaxllm_kernels.recurrent.rows import StateRows, prepare_rows

LENGTHS = np.array([1, 40, 2, 3, 0])
# Those of the rows. The row of 2 tokens has none: there are six.
SLOTS, NUM_SLOTS = (4, 2, 9, 0, 1), 6

# Operands, states and rows of a step to outputs and states.
Compute = Callable[[Sequence[jax.Array], jax.Array, StateRows], tuple[jax.Array, jax.Array]]


def assert_as_xla(
    kernels: Compute,
    xla: Compute,
    draw: Callable[[np.random.Generator, int], Any],
    state_shape: tuple[int, ...],
    num_tokens: int,
) -> None:
    """Compare a decode and rows of 40, 2, 3 and no tokens. The row of 3 begins its request.

    Args:
      draw: draws the operands of so many tokens.
      state_shape: of one slot.
      num_tokens: of the step, 46 or more; behind the 46 is padding.
    """
    random = np.random.default_rng(0)
    shape = (NUM_SLOTS, *state_shape)
    before = jnp.asarray(random.normal(size=shape), jnp.float32).at[0].set(jnp.nan)
    total = LENGTHS.sum()
    operands = []
    for drawn in draw(random, total):
        padding = [(0, num_tokens - total), *[(0, 0)] * (drawn.ndim - 1)]
        operands.append(jnp.pad(jnp.asarray(drawn), padding, constant_values=jnp.nan))
    batch = RaggedBatch(
        query_starts=jnp.asarray(np.concatenate([[0], LENGTHS.cumsum()]), jnp.int32),
        context_lens=jnp.array([9, 90, 9, 3, 0]),
        block_tables=jnp.zeros((len(LENGTHS), 0), jnp.int32),
        num_decodes=jnp.int32(1),
        block_size=1,
        decode_only=False,
    )
    rows = prepare_rows(batch, jnp.array(SLOTS), num_tokens=num_tokens, num_slots=NUM_SLOTS)

    def run(compute: Compute) -> tuple[jax.Array, jax.Array]:
        # Outputs have the memory of NaN.
        out = jax.eval_shape(compute, operands, before, rows)[0]
        jitted = jax.jit(lambda nan, *args: compute(*args), donate_argnums=0, keep_unused=True)
        # An emulated kernel must not outlive its test.
        return jax.block_until_ready(jitted(jnp.full_like(out, jnp.nan), operands, before, rows))

    (out, after), (right, expected) = map(run, (kernels, xla))
    computed = np.r_[:41, 43:46]
    np.testing.assert_allclose(out[computed], right[computed], atol=1e-5)
    np.testing.assert_array_equal(np.delete(out, computed, axis=0), 0)
    own = np.array([4, 2, 0])
    np.testing.assert_allclose(after[own], expected[own], atol=1e-5)
    others = np.array([1, 3, 5])
    np.testing.assert_array_equal(after[others], before[others])
