"""The wirings of a layer, against their formulas; with real attention, MLPs and norms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch, get_backend

from jaxllm.layers.attention import AttentionSpec
from jaxllm.layers.context import StepContext
from jaxllm.layers.mlp import MLPSpec
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.layers.rope import RopeConfig, rotary
from jaxllm.models.blocks import ParallelBlock, PostNormBlock, PreNormBlock, SandwichBlock
from jaxllm.models.specs import LayerSpec

SIZE, TOKENS = 16, 5
ROPE = RopeConfig(size=4, theta=100.0)
ATTENTION = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=8, scale=0.3, rope=ROPE)
BACKEND = get_backend("reference")


class SecondAttentionSpec(AttentionSpec):
    name = "other_attn"


class SecondMLPSpec(MLPSpec):
    name = "other_mlp"


def spec(block, **changes):
    fields = {
        "mixers": (ATTENTION,),
        "ffns": (MLPSpec(intermediate_size=24),),
        "norm": RMSNormSpec(eps=1e-5),
        "block": block,
    }
    return LayerSpec(**fields | changes)


def make(layer_spec):
    """A layer with random weights."""
    layer = layer_spec.block(layer_spec, SIZE, num_shards=1, dtype=jnp.float32)
    rng = np.random.default_rng(0)
    graphdef, state = nnx.split(layer)
    state = jax.tree.map(lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype), state)
    return nnx.merge(graphdef, state)


def run(layer, hidden):
    """What a layer makes of a sequence; and its parts by name, as functions of their input."""
    batch = RaggedBatch(
        query_starts=jnp.array([0, TOKENS]),
        context_lens=jnp.array([TOKENS]),
        block_tables=jnp.arange(2)[None],
        num_decodes=jnp.int32(0),
        block_size=4,
        decode_only=False,
    )
    configs = tuple(getattr(layer, mixer.name).config for mixer in layer.spec.mixers)
    context = dataclasses.replace(
        StepContext.prepare(
            dict.fromkeys({config.sliding_window for config in configs}, batch),
            configs,
            num_tokens=TOKENS,
            backend=BACKEND,
        ),
        rotary=rotary(ROPE, jnp.arange(TOKENS)),
    )
    shapes = [
        BACKEND.cache_shape(config, num_blocks=2, block_size=4, dtype=jnp.float32)
        for config in configs
    ]
    caches = tuple(jnp.zeros(shape.shape, shape.dtype) for shape in shapes)
    out, updated = layer(hidden, caches, context)
    assert len(updated) == len(caches)

    def attend(x, name="self_attn", index=0):
        return getattr(layer, name)(x, caches[index], context)[0]

    def feed(x, name="mlp"):
        return getattr(layer, name)(x, context)

    return np.asarray(out), attend, feed


@pytest.fixture(scope="module")
def hidden():
    return jnp.asarray(np.random.default_rng(1).standard_normal((TOKENS, SIZE)), jnp.float32)


def test_pre_norm(hidden):
    layer = make(spec(PreNormBlock))
    out, attend, feed = run(layer, hidden)
    x = hidden + attend(layer.input_layernorm(hidden))
    np.testing.assert_array_equal(out, x + feed(layer.post_attention_layernorm(x)))


def test_post_norm(hidden):
    layer = make(spec(PostNormBlock))
    out, attend, feed = run(layer, hidden)
    x = hidden + layer.post_attention_layernorm(attend(hidden))
    np.testing.assert_array_equal(out, x + layer.post_feedforward_layernorm(feed(x)))


def test_sandwich(hidden):
    layer = make(spec(SandwichBlock))
    out, attend, feed = run(layer, hidden)
    x = hidden + layer.post_attention_layernorm(attend(layer.input_layernorm(hidden)))
    fed = feed(layer.pre_feedforward_layernorm(x))
    np.testing.assert_array_equal(out, x + layer.post_feedforward_layernorm(fed))


def test_parallel(hidden):
    layer = make(spec(ParallelBlock))
    out, attend, feed = run(layer, hidden)
    x = layer.input_layernorm(hidden)
    np.testing.assert_array_equal(out, hidden + attend(x) + feed(x))


def test_residuals_may_be_scaled(hidden):
    layer = make(spec(PreNormBlock, residual_scale=0.22))
    out, attend, feed = run(layer, hidden)
    x = hidden + attend(layer.input_layernorm(hidden)) * 0.22
    expected = x + feed(layer.post_attention_layernorm(x)) * 0.22
    np.testing.assert_array_equal(out, expected)


def test_the_scale_of_residuals_is_not_rounded_to_16_bits():
    layer = make(spec(PreNormBlock, residual_scale=0.22))
    output = jnp.arange(1, 100, dtype=jnp.bfloat16)
    scaled = layer.add(jnp.zeros_like(output), output)
    expected = (np.arange(1, 100, dtype=np.float32) * np.float32(0.22)).astype(scaled.dtype)
    assert scaled.dtype == jnp.bfloat16
    np.testing.assert_array_equal(scaled, expected)


def test_outputs_of_several_in_one_place_are_added(hidden):
    second = SecondAttentionSpec(num_heads=2, num_kv_heads=1, head_size=8, scale=0.5, rope=None)
    mlps = (MLPSpec(intermediate_size=24), SecondMLPSpec(intermediate_size=8))
    layer = make(spec(PreNormBlock, mixers=(ATTENTION, second), ffns=mlps))
    out, attend, feed = run(layer, hidden)
    x = layer.input_layernorm(hidden)
    x = hidden + (attend(x) + attend(x, "other_attn", 1))
    fed = layer.post_attention_layernorm(x)
    np.testing.assert_array_equal(out, x + (feed(fed) + feed(fed, "other_mlp")))


def test_attention_without_rope_does_not_see_positions(hidden):
    layer = make(spec(PreNormBlock, mixers=(SecondAttentionSpec(
        num_heads=2, num_kv_heads=1, head_size=8, scale=0.5, rope=None
    ),)))  # fmt: skip
    out = run(layer, hidden)[0]
    order = jnp.array([2, 0, 1, 3, 4])
    # The last token sees the same tokens before it, whatever their order.
    np.testing.assert_allclose(run(layer, hidden[order])[0][-1], out[-1], atol=1e-5)
    rotated = make(spec(PreNormBlock))
    assert np.abs(run(rotated, hidden[order])[0][-1] - run(rotated, hidden)[0][-1]).max() > 1e-3
