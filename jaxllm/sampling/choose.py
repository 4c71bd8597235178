"""Choosing one token per row from its logits: the most likely one, or a random one.

Both look at blocks of the vocabulary first and then inside one block. For the arg-max that is
three times as fast on CPU as XLA's own; a draw needs sums of blocks and two random numbers per row,
where the usual Gumbel noise needs a random number for every token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxllm_kernels.common import round_up
from jaxllm_kernels.top_k_mask.api import top_k_top_p_min_p_mask

from jaxllm.sampling.row_params import RowParams

_BLOCK = 128
_LARGEST = jnp.finfo(jnp.float32).max


class MostLikely(NamedTuple):
    """The most likely token of each row."""

    tokens: jax.Array  # i32 [R]; the first of equals
    # f32 [R]: theirs, which are the largest; infinite where any logit of the row is that or NaN.
    logits: jax.Array


def most_likely(logits: jax.Array) -> MostLikely:
    """The arg-max of each row of f32 [R, V], and the maximum."""
    blocks = _blocks(logits, fill=-jnp.inf)
    # Not NaN itself, which a maximum drops or keeps as the compiler likes.
    largest = jnp.max(jnp.where(blocks < jnp.inf, blocks, jnp.inf), axis=2)
    block = jnp.argmax(largest, axis=1)
    tokens = _token(block, jnp.argmax(_block_of(blocks, block), axis=1))
    # Looked up: a maximum of maxima XLA would make one of all logits, and so read them again.
    return MostLikely(tokens, jnp.take_along_axis(largest, block[:, None], axis=1)[:, 0])


def draw(
    logits: jax.Array, params: RowParams, *, random: jax.Array, positions: jax.Array
) -> jax.Array:
    """Draw a token for each row that is `random`, bool [R]; the others get some token."""
    temperature = jnp.where(random, params.temperature, 1)[:, None]
    # Where the division overflows, all that did are equally and alone likely.
    logits = jnp.minimum(logits / temperature, _LARGEST)
    logits = top_k_top_p_min_p_mask(
        logits,
        jnp.where(random, params.top_k, 0),
        jnp.where(random, params.top_p, 1),
        jnp.where(random, params.min_p, 0),
    )
    largest = jnp.max(logits, axis=1, keepdims=True)
    blocks = _blocks(jnp.exp(logits - largest), fill=0)
    uniform = jax.vmap(_uniform)(params.seed, positions)
    block = _pick(jnp.sum(blocks, axis=2), uniform[:, 0])
    return _token(block, _pick(_block_of(blocks, block), uniform[:, 1]))


def _uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    """Two numbers in [0, 1) that depend on nothing but the seed and the position.

    Folding the position into the key is one evaluation of the generator, whose output is random
    bits: making another key of them, to draw bits from that, would only be a second one.
    """
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    bits = jax.random.key_data(jax.random.fold_in(key, position))
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def _pick(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Draw an index of each row of f32 [R, n] in proportion to its weights, which are not negative.

    An index without weight is never drawn, whatever the rounding: the first one is taken that has
    some and where the sum exceeds its share, else the last one that has some.
    """
    sums = jnp.cumsum(weights, axis=1)
    index = jnp.arange(weights.shape[1])
    has_weight = weights > 0
    reached = has_weight & (sums > uniform[:, None] * sums[:, -1:])
    last = jnp.max(jnp.where(has_weight, index, 0), axis=1)
    return jnp.min(jnp.where(reached, index, last[:, None]), axis=1)


def _blocks(x: jax.Array, fill: float) -> jax.Array:
    """Cut rows f32 [R, V] into blocks, f32 [R, V / BLOCK rounded up, BLOCK]."""
    rows, vocab_size = x.shape
    padding = round_up(vocab_size, _BLOCK) - vocab_size
    x = jnp.pad(x, ((0, 0), (0, padding)), constant_values=fill)
    return x.reshape(rows, -1, _BLOCK)


def _block_of(blocks: jax.Array, block: jax.Array) -> jax.Array:
    return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]


def _token(block: jax.Array, place: jax.Array) -> jax.Array:
    return (block * _BLOCK + place).astype(jnp.int32)
