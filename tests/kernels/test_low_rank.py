"""Low-rank products: each token with its own adapter, or none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.low_rank.api import LowRank
from jaxllm_kernels.low_rank.reference import reference
from jaxllm_kernels.low_rank.xla import by_all_slots

SLOTS = jnp.array([0, 3, 2, 2, 3, 1], jnp.int32)  # 3 is none


def weights(dtype, columns=(4, 2, 2), shards=1):
    """Of three slots, for a layer of six inputs that is fused of parts with these columns."""
    random = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape), dtype)

    return LowRank(draw(3, len(columns), 2, 6), tuple(draw(3, 2, shards, c) for c in columns))


@pytest.mark.parametrize("columns", [(5,), (4, 2, 2)])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 5e-2)])
def test_xla_is_right(columns, shards, dtype, tolerance):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(6, 6)), dtype)
    its = weights(dtype, columns, shards)
    out = by_all_slots(x, its, SLOTS)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, reference(x, its, SLOTS), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("op", [reference, by_all_slots])
def test_a_token_without_an_adapter_gets_zeros(op):
    x = jnp.ones((6, 6))
    out = np.asarray(op(x, weights("float32"), SLOTS))
    assert not out[[1, 4]].any()
    assert out[[0, 2, 3, 5]].any(axis=1).all()


def test_reference_is_the_formula():
    x, its = (
        jnp.asarray(np.random.default_rng(1).normal(size=(1, 6)), "float32"),
        weights("float32"),
    )
    out = jax.jit(reference)(x, its, jnp.array([2], jnp.int32))[0]
    parts = [its.b[part][2, :, 0].T @ (its.a[2, part] @ x[0]) for part in range(3)]
    np.testing.assert_allclose(out, np.concatenate(parts), rtol=1e-5)
