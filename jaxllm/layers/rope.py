"""Rotary position embeddings, with the scalings that stretch them beyond the trained length.

The frequencies follow the formulas of transformers (`modeling_rope_utils`), in float32 as there.
They are constants of the traced program: a model has no rope tables among its weights.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by a factor."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """NTK-aware scaling whose base grows with the length of the sequence.

    A token at a position past the original length is rotated with the base for the sequence that
    ends there, once and for all. So its key does not depend on how a prompt was cut into chunks or
    on what came from the cache, and the result is that of transformers fed token by token. (Fed
    with a whole prompt that is longer than the original, transformers rotates all of it with the
    base of the prompt's end, and leaves those keys as they are while it generates.)
    """

    factor: float
    original_max_len: int


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies divided by a factor, high ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): a ramp like Llama 3's, and cos and sin scaled as a temperature."""

    factor: float
    original_max_len: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """What is static about a layer's rotary embedding."""

    size: int  # of the part of a head that is rotated: its first elements, often all
    theta: float
    scaling: LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | None = None


class Rotary(NamedTuple):
    """Rotations of the tokens of a step, shared by all layers with the same RopeConfig."""

    cos: jax.Array  # f32 [T, size / 2]
    sin: jax.Array  # f32 [T, size / 2]


def rotary(rope: RopeConfig, positions: jax.Array) -> Rotary:
    """The rotations of tokens at positions [T]."""
    with jax.named_scope("rope"):
        angles = positions[:, None].astype(jnp.float32) * _frequencies(rope, positions)
        scale = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0

        def turn(angles: jax.Array) -> Rotary:
            return Rotary(jnp.cos(angles) * scale, jnp.sin(angles) * scale)

        def turn_once(angles: jax.Array) -> Rotary:
            # Else XLA:CPU computes them in every loop that rotates, anew for each head of each
            # layer: a sixth of a decode step. A barrier does not last until it fuses loops; what
            # is in a conditional stays there.
            never = Rotary(jnp.zeros_like(angles), jnp.zeros_like(angles))
            return jax.lax.cond(jnp.all(angles >= 0), turn, lambda _: never, angles)

        return jax.lax.platform_dependent(angles, cpu=turn_once, default=turn)


def rotate(x: jax.Array, rotations: Rotary) -> jax.Array:
    """Rotate the first elements of heads x [T, heads, H], as many as there are rotations for; the
    first half of them pairs with the second."""
    cos, sin = rotations.cos[:, None], rotations.sin[:, None]
    size = 2 * cos.shape[-1]
    if size < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :size], rotations), x[..., size:]], axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def inverse_frequencies(rope: RopeConfig) -> np.ndarray:
    """Angle per position of every pair, float32 [size / 2]; of dynamic scaling, within the original
    length."""
    plain = 1.0 / rope.theta ** _exponents(rope.size)
    match rope.scaling:
        case LinearScaling(factor=factor):
            return plain / np.float32(factor)
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(rope, scaling)
        case _:
            return plain


def _frequencies(rope: RopeConfig, positions: jax.Array) -> jax.Array | np.ndarray:
    frequencies = inverse_frequencies(rope)
    if not isinstance(rope.scaling, DynamicScaling):
        return frequencies
    factor, original = rope.scaling.factor, rope.scaling.original_max_len
    length = jnp.maximum(positions + 1, original).astype(jnp.float32)[:, None]
    stretch = factor * length / original - (factor - 1.0)
    base = rope.theta * stretch ** (rope.size / (rope.size - 2))
    return jnp.where(length > original, 1.0 / base ** _exponents(rope.size), frequencies)


def _exponents(size: int) -> np.ndarray:
    return np.arange(0, size, 2, dtype=np.float32) / np.float32(size)


def _llama3(plain: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    wavelengths = np.float32(2 * math.pi) / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # 0 for wavelengths that the original length held fewer than `low` times, 1 from `high` on.
    kept = np.clip((scaling.original_max_len / wavelengths - low) / (high - low), 0, 1)
    return ((1 - kept) * plain / scaling.factor + kept * plain).astype(np.float32)


def _yarn(rope: RopeConfig, scaling: YarnScaling) -> np.ndarray:
    def pair_with(num_rotations: float) -> float:
        """The (fractional) pair that turns this often within the original length."""
        turns = scaling.original_max_len / (num_rotations * 2 * math.pi)
        return rope.size * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    if low == high:
        high += 0.001
    pairs = np.arange(rope.size // 2, dtype=np.float32)
    interpolated = np.clip((pairs - low) / (high - low), 0, 1)
    wavelengths = rope.theta ** _exponents(rope.size)
    frequencies = interpolated / (scaling.factor * wavelengths) + (1 - interpolated) / wavelengths
    return frequencies.astype(np.float32)
