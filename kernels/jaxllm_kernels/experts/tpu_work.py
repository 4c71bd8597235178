"""The work of the TPU kernel for many tokens: choices by their experts, cut into items."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm_kernels.common import cdiv
from jaxllm_kernels.experts.tpu_sizes import SUBLANES


class Work(NamedTuple):
    """What the kernel is told in advance. An item is some choices of one expert."""

    experts: jax.Array  # int32 [items], ascending
    starts: jax.Array  # int32 [items]: the first choice
    counts: jax.Array  # int32 [items]: the number of choices
    tokens: jax.Array  # int32 [choices], and some more that may be read: of each choice
    factors: jax.Array  # float32, likewise


def make_work(
    chosen: jax.Array, factors: jax.Array, num_experts: int, item_rows: int
) -> tuple[Work, jax.Array]:
    """The work, and its number of items: at least one, which may be empty."""
    num_choices = chosen.size
    is_here = (chosen >= 0) & (chosen < num_experts)
    experts = jnp.where(is_here, chosen, num_experts).reshape(-1)
    # One number sorts by the expert, then by the token.
    keys = experts * num_choices + jnp.arange(num_choices, dtype=jnp.int32)
    keys, sorted_factors = lax.sort((keys, factors.reshape(-1)), num_keys=1, is_stable=False)
    tokens = lax.div(lax.rem(keys, num_choices), chosen.shape[1])

    numbers = jnp.arange(num_experts, dtype=jnp.int32)
    counts = jnp.sum(experts == numbers[:, None], axis=1, dtype=jnp.int32)
    num_items = lax.div(counts + (item_rows - 1), item_rows)
    is_before = numbers < numbers[:, None]
    first_choices = jnp.sum(jnp.where(is_before, counts, 0), axis=1)
    first_items = jnp.sum(jnp.where(is_before, num_items, 0), axis=1)
    # Every expert may have an item that is not full.
    items = jnp.arange(num_experts + cdiv(num_choices, item_rows), dtype=jnp.int32)[:, None]
    is_of = (items >= first_items) & (items < first_items + num_items)

    def of_expert(values: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(is_of, values, 0), axis=1)

    skipped = (items - first_items) * item_rows
    work = Work(
        experts=of_expert(numbers),
        starts=of_expert(first_choices + skipped),
        counts=of_expert(jnp.minimum(counts - skipped, item_rows)),
        # The kernel reads them in groups.
        tokens=jnp.pad(tokens, (0, SUBLANES)),
        factors=jnp.pad(sorted_factors, (0, SUBLANES)),
    )
    return work, jnp.maximum(jnp.sum(num_items), 1)
