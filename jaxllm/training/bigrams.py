"""Fits the first embeddings to bigrams.

Counting is cheaper than gradient descent. Before the first step, embedding and head are fitted to
the bigrams of the whole training text, without the layers between them. A run of few steps then
spends them on longer contexts.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxllm.errors import refused

_MAX_VOCAB_SIZE = 16384  # limits the table of pairs
_RMS = 0.25  # of an embedding's entries


def bigrams(tokens: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the count of each token before another [V], and the probabilities of the next [V, V].

    Witten-Bell smoothing: an unseen successor is more likely after a token with many successors.
    """
    pairs = tokens[:-1].astype(np.int64) * vocab_size + tokens[1:]
    counts = np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size)
    counts = counts.astype(np.float32)
    often = counts.sum(1)
    anywhere = (counts.sum(0) + 1) / (counts.sum() + vocab_size)
    kinds = np.maximum((counts > 0).sum(1), 1)[:, None]
    return often, (counts + kinds * anywhere) / (often[:, None] + kinds)


def fit_embeddings(
    tokens: np.ndarray, vocab_size: int, hidden_size: int, *, steps: int, seed: int
) -> tuple[jax.Array, jax.Array]:
    """Fit embedding and head, both [V, D], so that their product after a norm gives the bigrams."""
    if vocab_size > _MAX_VOCAB_SIZE:
        raise refused(
            "bigram_steps",
            steps,
            f"a vocabulary above {_MAX_VOCAB_SIZE} has too many pairs; give 0",
        )
    often, following = bigrams(tokens, vocab_size)
    shares = jnp.asarray(often / often.sum())
    rng = np.random.default_rng(seed)
    shape = (2, vocab_size, hidden_size)
    pair = jnp.asarray(rng.standard_normal(shape) * [[[1.0]], [[0.02]]], jnp.float32)
    optimizer = optax.scale_by_adam(b1=0.9, b2=0.95)

    def loss(pair: jax.Array, following: jax.Array) -> jax.Array:
        logits = _normed(pair[0]) @ pair[1].T
        costs = jax.nn.logsumexp(logits, axis=1) - jnp.sum(following * logits, axis=1)
        return jnp.sum(shares * costs)

    @jax.jit
    def step(pair, state, following, rate):
        gradient = jax.grad(loss)(pair, following)
        direction, state = optimizer.update(gradient, state)
        # Only an embedding's direction matters, and it is fifty times as large as the head.
        return pair - rate * jnp.array([10.0, 1.0])[:, None, None] * direction, state

    state = optimizer.init(pair)
    following = jnp.asarray(following)
    for number in range(steps):
        rate = 0.02 * 0.5 * (1 + math.cos(math.pi * number / steps))
        pair, state = step(pair, state, following, rate)
    return _RMS * _normed(pair[0]), pair[1]


def _normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
