"""Chooses one token per row from its logits: the most likely one, or a random one.

A random token is an arg-max, too: of the logarithms of the probabilities, plus Gumbel noise. The
noise depends on nothing but the request's seed, the position and the token. So it is the same alone
and in a batch, and a draft model's draw with it is mostly the same token.

Noise for every token would be a random number for each of the vocabulary. So the draw has two
levels: a block of 128 tokens, with noise of its own, and a token in it, with noise of its place.
P(block) * P(token | block) = P(token): the draw is as exact, and takes V / 128 + 128 numbers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.sampling.layout import BLOCK, Layout
from jaxllm.sampling.row_params import RowParams

_FLOAT = jnp.finfo(jnp.float32)


class MostLikely(NamedTuple):
    """The most likely token of each row."""

    tokens: jax.Array  # i32 [R]; the first of equals
    # f32 [R]: the largest logit; +inf where the row has a logit of +inf or NaN.
    logits: jax.Array


def most_likely(logits: jax.Array, layout: Layout) -> MostLikely:
    """The arg-max of each row of f32 [R, V], and the maximum."""
    return MostLikely(*layout.arg_max(logits))


def draw(
    logits: jax.Array,
    params: RowParams,
    *,
    random: jax.Array,
    positions: jax.Array,
    largest: jax.Array,
    layout: Layout,
) -> jax.Array:
    """Draw a token for each row that is `random`, bool [R]; other rows get an arbitrary one.
    `largest` f32 [R] are the rows' largest logits."""
    top_k = jnp.where(random, params.top_k, 0)
    top_p = jnp.where(random, params.top_p, 1)
    min_p = jnp.where(random, params.min_p, 0)
    temperature = jnp.where(random, params.temperature, 1)

    def heated(x: jax.Array) -> jax.Array:
        # If the division overflows, the overflowing tokens are equally likely, and no others.
        return jnp.minimum(x / temperature[:, None], _FLOAT.max)

    def relative() -> jax.Array:
        """Probabilities divided by that of the row's most likely token."""
        first = heated(jnp.where(jnp.isfinite(largest), largest, 0)[:, None])
        return jnp.exp(heated(logits) - first)

    lowest = jax.lax.cond(
        jnp.any((top_k > 0) | (top_p < 1) | (min_p > 0)),
        lambda: layout.cut(relative(), top_k, top_p, min_p),
        lambda: min_p,
    )
    p = relative()
    # A subnormal number may be zero to one operation and not to the next, so it counts as zero.
    weights = jnp.where(p >= jnp.maximum(lowest, _FLOAT.tiny)[:, None], p, 0)
    by_block = jnp.log(layout.block_sums(weights))
    of_blocks, of_places = _noise(params.seed, positions, max(by_block.shape[1], BLOCK))
    block = jnp.argmax(by_block + of_blocks[:, : by_block.shape[1]], axis=1)
    by_place = jnp.log(layout.block_of(weights, block))
    place = jnp.argmax(by_place + of_places[:, :BLOCK], axis=1)
    return (block * BLOCK + place).astype(jnp.int32)


def _noise(seed: jax.Array, positions: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """Gumbel noise of the first n blocks and of the first n places, f32 [R, n] each.

    Folding a number into a key evaluates the generator once, for two words of random bits. The
    words of number i are for block i and place i.
    """

    def of_row(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        numbers = jnp.arange(n, dtype=jnp.uint32)
        return jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, numbers))

    words = jax.vmap(of_row)(seed, positions)
    return _gumbel(words[:, :, 0]), _gumbel(words[:, :, 1])


def _gumbel(bits: jax.Array) -> jax.Array:
    """Gumbel noise of random bits.

    The largest values decide most draws. They come from the smallest uniform numbers, which have
    all their digits. A uniform number of one, by rounding, would be noise of -inf.
    """
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))
