"""The embedding, and its use as the output head."""

import jax.numpy as jnp
import numpy as np

from jaxllm.layers.embedding import Embedding


def embedding(dtype=jnp.float32):
    layer = Embedding(6, 4, dtype=dtype)
    layer.weight[...] = jnp.arange(24, dtype=dtype).reshape(6, 4)
    return layer


def test_rows_of_tokens():
    np.testing.assert_array_equal(embedding()(jnp.array([5, 0])), [[20, 21, 22, 23], [0, 1, 2, 3]])


def test_what_is_beyond_the_vocabulary_becomes_zeros():
    rows = embedding()(jnp.array([6, 5, 2**31 - 1]))
    np.testing.assert_array_equal(rows, [[0] * 4, [20, 21, 22, 23], [0] * 4])


def test_logits_are_float32_products_with_every_row():
    hidden = jnp.array([[1, 0, 0, 0], [0, 0, 0, 2]], jnp.bfloat16)
    logits = embedding(jnp.bfloat16).logits(hidden)
    assert logits.dtype == jnp.float32
    np.testing.assert_array_equal(logits, [[0, 4, 8, 12, 16, 20], [6, 14, 22, 30, 38, 46]])
