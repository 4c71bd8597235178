"""Rotary embeddings: the geometry, and the frequencies of every scaling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
    inverse_frequencies,
)
from jaxllm.layers.rope import rotary as rotary_of_step
from jaxllm.layers.rope import rotate as rotate_of_step

# Compiled whole, as in a step; each operation alone would be a program.
rotary = jax.jit(rotary_of_step, static_argnums=0)
rotate = jax.jit(rotate_of_step)

LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192)
YARN = YarnScaling(
    factor=4.0,
    original_max_len=32768,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=True,
    attention_factor=1.25,
)


def rope(scaling=None, *, head_size=64, theta=10_000.0):
    return RopeConfig(size=head_size, theta=theta, scaling=scaling)


def test_the_rest_of_a_head_is_left_as_it_is():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 16)), jnp.float32)
    rotations = rotary(RopeConfig(size=8, theta=100.0), jnp.array([0, 5, 9]))
    rotated = rotate(x, rotations)
    np.testing.assert_array_equal(rotated[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(rotated[..., :8], rotate(x[..., :8], rotations))


def scores(config, q, k, q_position, k_position):
    rotated = [
        rotate(jnp.asarray(x)[None, None], rotary(config, jnp.array([position])))
        for x, position in [(q, q_position), (k, k_position)]
    ]
    return float(jnp.vdot(*rotated))


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    q, k = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    assert scores(rope(), q, q, 9, 9) == pytest.approx(float(q @ q), rel=1e-5)
    assert scores(rope(), q, k, 12, 5) == pytest.approx(scores(rope(), q, k, 107, 100), abs=1e-3)
    assert scores(rope(), q, k, 12, 5) != pytest.approx(scores(rope(), q, k, 12, 6), abs=1e-3)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about what XLA:CPU does")
def test_angles_are_computed_once_for_all_that_is_rotated():
    def rotate_all(xs, positions):
        rotations = rotary_of_step(rope(), positions)
        return [rotate_of_step(x, rotations) for x in xs]

    xs = [jnp.ones((8, heads, 64)) for heads in (2, 4)]
    positions = jnp.arange(8)
    compiled = jax.jit(rotate_all).lower(xs, positions).compile()
    assert compiled.as_text().count(" cosine(") == 1
    for rotated, x in zip(compiled(xs, positions), xs, strict=True):
        np.testing.assert_allclose(rotated, rotate(x, rotary(rope(), positions)), rtol=1e-6)


def test_position_zero_is_left_alone():
    x = np.random.default_rng(0).standard_normal((1, 2, 64)).astype(np.float32)
    np.testing.assert_array_equal(rotate(jnp.asarray(x), rotary(rope(), jnp.array([0]))), x)


def test_first_half_of_the_head_pairs_with_the_second():
    x = jnp.zeros((1, 1, 64)).at[0, 0, 3].set(1.0)
    rotated = np.asarray(rotate(x, rotary(rope(), jnp.array([2]))))[0, 0]
    angle = 2 * 10_000.0 ** (-2 * 3 / 64)
    assert rotated[3] == pytest.approx(np.cos(angle), abs=1e-6)
    assert rotated[3 + 32] == pytest.approx(np.sin(angle), abs=1e-6)


def test_rotation_keeps_the_type_of_the_activations():
    x = jnp.ones((3, 2, 64), jnp.bfloat16)
    rotations = rotary(rope(), jnp.arange(3))
    assert rotate(x, rotations).dtype == jnp.bfloat16
    assert rotations.cos.dtype == jnp.float32


def test_linear_scaling_divides_positions():
    scaled = rotary(rope(LinearScaling(factor=4.0)), jnp.array([40]))
    np.testing.assert_allclose(scaled.cos, rotary(rope(), jnp.array([10])).cos, atol=1e-6)


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones():
    plain, scaled = inverse_frequencies(rope()), inverse_frequencies(rope(LLAMA3))
    wavelengths = 2 * np.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    assert short.any() and long.any()
    np.testing.assert_array_equal(scaled[short], plain[short])
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-6)
    between = ~(short | long)
    assert ((plain / 8 <= scaled) & (scaled <= plain))[between].all()


def test_proportional_scaling_rotates_the_first_pairs_of_the_whole_head():
    x = np.random.default_rng(0).standard_normal((1, 2, 64)).astype(np.float32)
    partly = rope(ProportionalScaling(num_pairs=5))
    rotated = rotate(jnp.asarray(x), rotary(partly, jnp.array([7])))
    whole = rotate(jnp.asarray(x), rotary(rope(), jnp.array([7])))
    for first in (0, 32):
        np.testing.assert_array_equal(
            rotated[..., first : first + 5], whole[..., first : first + 5]
        )
        rest = slice(first + 5, first + 32)
        np.testing.assert_array_equal(rotated[..., rest], x[..., rest])


def test_yarn_scales_cos_and_sin():
    at_zero = rotary(rope(YARN), jnp.array([0]))
    np.testing.assert_allclose(at_zero.cos, 1.25)
    np.testing.assert_allclose(at_zero.sin, 0)


def test_long_rope_divides_each_frequency_and_scales_cos_and_sin():
    factors = tuple(float(factor) for factor in range(1, 33))
    scaled = rope(LongRopeScaling(factors=factors, attention_factor=1.25))
    expected = inverse_frequencies(rope()) / np.array(factors, np.float32)
    np.testing.assert_allclose(inverse_frequencies(scaled), expected, rtol=1e-6)
    np.testing.assert_allclose(rotary(scaled, jnp.array([0])).cos, 1.25)


def test_dynamic_scaling_changes_positions_past_the_original_length_only():
    positions = jnp.arange(32)
    plain = rotary(rope(), positions)
    scaled = rotary(rope(DynamicScaling(factor=2.0, original_max_len=16)), positions)
    np.testing.assert_array_equal(scaled.cos[:16], plain.cos[:16])
    assert (np.abs(scaled.cos[16:] - plain.cos[16:]).max(axis=1) > 1e-3).all()


@pytest.mark.oracle
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("head_size", [64, 128, 80])
@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        (LinearScaling(factor=4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            LLAMA3,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        (
            YARN,
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "attention_factor": 1.25,
            },
        ),
    ],
    ids=["linear", "llama3", "yarn"],
)
def test_frequencies_match_transformers(scaling, parameters, head_size, theta):
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=head_size,
        num_attention_heads=1,
        max_position_embeddings=131072,
        rope_parameters=parameters | {"rope_theta": theta},
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    found = inverse_frequencies(rope(scaling, head_size=head_size, theta=theta))
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-6)
    assert attention_factor == getattr(scaling, "attention_factor", 1.0)


@pytest.mark.oracle
@pytest.mark.parametrize(("head_size", "share", "num_pairs"), [(512, 0.25, 64), (40, 0.6, 12)])
def test_proportional_frequencies_match_transformers(head_size, share, num_pairs):
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": 1e6, "partial_rotary_factor": share, "factor": 2.0}
    config = LlamaConfig(
        hidden_size=head_size,
        num_attention_heads=1,
        rope_parameters=parameters | {"rope_type": "proportional"},
    )
    expected, _ = ROPE_INIT_FUNCTIONS["proportional"](config)
    scaling = ProportionalScaling(num_pairs=num_pairs, factor=2.0)
    found = inverse_frequencies(rope(scaling, head_size=head_size, theta=1e6))
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-6)
