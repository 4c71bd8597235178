"""The mask in plain XLA, without a sort: each cut is found by bisection.

Positive floats are ordered like their bits. So a row's cut, the lowest p that is kept, is found by
halving an interval of integers, each time with one pass over p that counts or adds up what is at or
above its middle. A row is settled by 8 to 20 passes in practice, by 31 in the worst case. A kind of
cut that no row uses costs nothing.

On two CPU cores, 16 rows of 32000 tokens: 0.3 ms per pass, 5 ms for top-k and top-p, against 200 ms
for a sort. Trying three cuts per pass, for half the passes, came out no faster there.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

_ONE = 0x3F800000  # the bits of 1.0, the largest p


def top_k_top_p_min_p_mask(
    logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    largest = jnp.max(logits, axis=1, keepdims=True)
    p = jnp.exp(logits - jnp.where(jnp.isfinite(largest), largest, 0))

    def above(bits: jax.Array) -> jax.Array:
        return p >= _float(bits)[:, None]

    def count(bits: jax.Array) -> jax.Array:
        return jnp.sum(above(bits), axis=1, dtype=jnp.float32)

    def mass(bits: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(above(bits), p, 0), axis=1)

    def cut_to_k(lowest: jax.Array) -> jax.Array:
        wanted = top_k.astype(jnp.float32)
        return _cut(count, wanted, lambda bits: 1.0, top_k > 0, lowest)

    def cut_to_share(lowest: jax.Array) -> jax.Array:
        return _cut(mass, top_p * mass(lowest), _float, top_p < 1, lowest)

    # Minus zero is a zero, too, and its bits would be the lowest of all integers.
    lowest = jax.lax.bitcast_convert_type(jnp.abs(min_p), jnp.int32)
    lowest = jax.lax.cond(jnp.any(top_k > 0), cut_to_k, lambda lowest: lowest, lowest)
    lowest = jax.lax.cond(jnp.any(top_p < 1), cut_to_share, lambda lowest: lowest, lowest)
    return jnp.where(above(lowest), logits, -jnp.inf)


def _cut(
    weigh: Callable[[jax.Array], jax.Array],
    wanted: jax.Array,
    least: Callable[[jax.Array], jax.Array | float],
    used: jax.Array,
    low: jax.Array,
) -> jax.Array:
    """Raise `low` as far as what is at or above it weighs `wanted`, in the rows that are `used`.

    `least(low)` bounds from below the weight of a token that is at or above low. When the surplus
    is less than that, no token can be spared: the row is settled, wherever exactly its cut lies.
    """

    def is_open(low: jax.Array, high: jax.Array, weight: jax.Array) -> jax.Array:
        return used & (high - low > 1) & (weight - wanted >= least(low))

    def halve(
        state: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        low, high, weight = state
        middle = low + (high - low) // 2
        weight_above = weigh(middle)
        going = is_open(low, high, weight)
        enough = weight_above >= wanted
        raised, lowered = going & enough, going & ~enough
        return (
            jnp.where(raised, middle, low),
            jnp.where(lowered, middle, high),
            jnp.where(raised, weight_above, weight),
        )

    start = (low, jnp.full_like(low, _ONE + 1), weigh(low))
    return jax.lax.while_loop(lambda state: jnp.any(is_open(*state)), halve, start)[0]


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
