"""Low-rank products: each token with its own adapter, or none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.low_rank.api import LowRank
from jaxllm_kernels.low_rank.native import NativeLowRank
from jaxllm_kernels.low_rank.reference import reference
from jaxllm_kernels.low_rank.xla import XlaLowRank

from tests.kernels.conftest import OTHER_PROCESSORS

# Six of one adapter, so that not all are computed together; 3 is none.
SLOTS = jnp.array([0, 3, 2, 2, 3, 1, 2, 2, 2, 2], jnp.int32)
NUM_INPUTS = 96
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
# Other processors' code is made of the same vectors as that of products, which test_dense.py tests
# for each; each is a library of its own to build.
THIS_PROCESSOR = pytest.mark.parametrize(
    "any_library",
    ["native", *(pytest.param(name, marks=pytest.mark.sweep) for name in OTHER_PROCESSORS)],
    indirect=True,
)


@pytest.fixture
def native(any_library):
    return NativeLowRank.load(any_library)


def weights(dtype, columns=(64, 32, 32), shards=1, rank=5):
    """Of three slots, for a layer that is fused of parts with these columns."""
    random = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape) / shape[-1] ** 0.5, dtype)

    a = draw(3, len(columns), rank, NUM_INPUTS)
    return LowRank(a, tuple(draw(3, rank, shards, c) for c in columns))


def inputs(dtype):
    return jnp.asarray(np.random.default_rng(1).normal(size=(len(SLOTS), NUM_INPUTS)), dtype)


def check(op, dtype, columns=(64, 32, 32), shards=1):
    x, its = inputs(dtype), weights(dtype, columns, shards)
    out = np.asarray(jax.jit(op)(x, its, SLOTS))
    assert out.dtype == np.float32
    expected = np.asarray(reference(x, its, SLOTS))
    assert np.linalg.norm(out - expected) / np.linalg.norm(expected) < TOLERANCES[dtype]
    assert not out[[1, 4]].any()  # which have none
    assert out[[0, 2, 3, 5]].any(axis=1).all()


@pytest.mark.parametrize("columns", [(80,), (64, 32, 32), (5, 3)])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_xla_is_right(columns, shards, dtype):
    check(XlaLowRank(), dtype, columns, shards)


# XLA computes the sizes of the last ones.
@THIS_PROCESSOR
@pytest.mark.parametrize(("columns", "shards"), [((80,), 1), ((64, 32, 32), 1), ((5, 3), 2)])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_native_is_right(native, columns, shards, dtype):
    check(native, dtype, columns, shards)


@THIS_PROCESSOR
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_token_gets_the_same_alone_and_among_others(native, dtype):
    op, its, x = jax.jit(native), weights(dtype), inputs(dtype)
    together = np.asarray(op(x, its, SLOTS))
    for token in range(len(SLOTS)):
        alone = op(x[token : token + 1], its, SLOTS[token : token + 1])
        assert np.array_equal(alone[0], together[token])


def test_reference_is_the_formula():
    x, its = inputs("float32")[:1], weights("float32")
    out = jax.jit(reference)(x, its, jnp.array([2], jnp.int32))[0]
    parts = [its.b[part][2, :, 0].T @ (its.a[2, part] @ x[0]) for part in range(3)]
    np.testing.assert_allclose(out, np.concatenate(parts), rtol=1e-4, atol=1e-6)
