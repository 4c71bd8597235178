"""Self-attention over whole rows: every implementation computes every case."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.ragged_self_attention.api import SelfAttentionConfig
from jaxllm_kernels.ragged_self_attention.cases import CASES, TOLERANCES, error
from jaxllm_kernels.ragged_self_attention.native import NativeSelfAttention
from jaxllm_kernels.ragged_self_attention.reference import ReferenceSelfAttention
from jaxllm_kernels.ragged_self_attention.xla import XlaSelfAttention


@pytest.fixture(scope="module")
def native(any_library):
    """The native op as built for each kind of processor."""
    return NativeSelfAttention.load(any_library)


@pytest.mark.parametrize("name", CASES)
def test_xla_is_right(name):
    assert error(XlaSelfAttention(), CASES[name]) < TOLERANCES["float32"]


@pytest.mark.parametrize("name", ["longer than a tile", "a reach"])
def test_xla_is_right_in_16_bits_and_with_other_tiles(name):
    assert error(XlaSelfAttention(), CASES[name], "bfloat16") < TOLERANCES["bfloat16"]
    assert error(XlaSelfAttention(tile=16), CASES[name]) < TOLERANCES["float32"]


@pytest.mark.parametrize("name", ["longer than a tile", "grouped heads", "a reach"])
def test_reference_is_right(name):
    assert error(ReferenceSelfAttention(), CASES[name]) < TOLERANCES["float32"]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_native_is_right(native, name, dtype):
    assert error(native, CASES[name], dtype) < TOLERANCES[dtype]


@pytest.mark.parametrize("reach", [None, 40])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_native_rows_have_the_same_bits_alone_and_among_others(native, num_kv_heads, reach):
    random = np.random.default_rng(5)
    lengths = (7, 400, 1, 30)  # of several stretches, and of more than one block of keys
    q, k, v = (
        jnp.asarray(random.normal(size=(450, heads, 40)), jnp.float32)
        for heads in (3, num_kv_heads, num_kv_heads)
    )
    config = SelfAttentionConfig(scale=0.2, reach=reach)
    attend = jax.jit(native, static_argnames="config")
    starts = np.cumsum((0, *lengths)).astype(np.int32)
    crowd = np.asarray(attend(q, k, v, jnp.asarray(starts), config=config))
    assert not crowd[starts[-1] :].any(), "padding is alike, so that products skip it"
    for first, end in zip(starts[:-1], starts[1:], strict=True):
        alone = attend(
            *(x[first:end] for x in (q, k, v)), jnp.asarray([0, end - first]), config=config
        )
        np.testing.assert_array_equal(crowd[first:end], alone)


@pytest.mark.parametrize("reach", [None, 1])
def test_what_is_no_number_stays_none_and_in_its_row(native, reach):
    random = np.random.default_rng(6)
    q, k, v = (jnp.asarray(random.normal(size=(9, 2, 16)), jnp.float32) for _ in range(3))
    starts, config = jnp.asarray([0, 5, 9]), SelfAttentionConfig(scale=1.0, reach=reach)
    attend = jax.jit(native, static_argnames="config")
    expected = np.asarray(attend(q, k, v, starts, config=config))
    that_see_it = [0, 1, 2, 3, 4] if reach is None else [1, 2, 3]
    for heads, spoilt in (
        ((q.at[2, 0].set(jnp.nan), k, v), [2]),
        ((q, k, v.at[2, 0].set(jnp.nan)), that_see_it),
    ):
        out = np.asarray(attend(*heads, starts, config=config))
        assert np.isnan(out[spoilt, 0]).all()
        np.testing.assert_array_equal(out[5:], expected[5:])
        np.testing.assert_array_equal(out[:, 1], expected[:, 1])


def test_what_is_not_there_is_not_attended_to(native):
    q = jnp.ones((4, 2, 16))
    attend = jax.jit(native, static_argnames="config")
    config = SelfAttentionConfig(scale=1.0)
    for operands, starts in (
        ((q, q, q[:1]), [0, 4]), ((q, q[:3], q), [0, 4]), ((q, q, q), [1, 4]), ((q, q, q), [0, 5]),
        ((q, q, q), [0, 3, 2]),
    ):  # fmt: skip
        with pytest.raises(jax.errors.JaxRuntimeError, match="do not fit|not within the batch"):
            attend(*operands, jnp.asarray(starts), config=config)
