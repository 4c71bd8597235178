"""Rotary position embeddings, with the scalings that extend them beyond the trained length.

The frequencies follow the formulas of transformers (`modeling_rope_utils`), in float32 as there.
They are constants of the traced program: the weights contain no rope tables.
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
    """NTK-aware scaling: the base grows with the length of the sequence.

    A token past the original length is always rotated with the base of the sequence that ends at
    its position. So its key does not depend on the chunks of prefill or on prefix cache hits.
    transformers computes the same when it is fed token by token. When it is fed a whole prompt
    longer than the original length, it rotates all of the prompt with the base of the prompt's end,
    and keeps these keys while it generates.
    """

    factor: float
    original_max_len: int


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: divides low frequencies by a factor, keeps high ones, with a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): a ramp like Llama 3's; cos and sin are scaled as a temperature."""

    factor: float
    original_max_len: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): a factor for every frequency; cos and sin are scaled.

    Models have one list of factors for sequences up to the original length, and another for longer
    ones. An engine uses one of them for all requests, chosen by its longest sequence, as vLLM does.
    So keys do not depend on what follows them. transformers chooses in every call, by the longest
    position in it, and keeps the keys of earlier calls.
    """

    factors: tuple[float, ...]
    attention_factor: float


@dataclass(frozen=True, kw_only=True)
class ProportionalScaling:
    """Gemma 4: only the pairs with the highest frequencies are rotated, and the others not at all.

    Pairs and their frequencies are those of the whole head, so this is not the rotation of a
    smaller head.
    """

    num_pairs: int  # that are rotated
    factor: float = 1.0


Scaling = (
    LinearScaling
    | DynamicScaling
    | Llama3Scaling
    | YarnScaling
    | LongRopeScaling
    | ProportionalScaling
)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """The static part of a layer's rotary embedding."""

    size: int  # of the rotated part of a head: its first elements, often all
    theta: float
    scaling: Scaling | None = None
    # Of each pair, which of a token's three positions rotates it: that in time, in the rows or in
    # the columns of an image. None: tokens have one position.
    axes: tuple[int, ...] | None = None

    @property
    def attention_factor(self) -> float:
        """What multiplies cos and sin."""
        match self.scaling:
            case YarnScaling(attention_factor=factor) | LongRopeScaling(attention_factor=factor):
                return factor
            case _:
                return 1.0


class Rotary(NamedTuple):
    """Rotations of the tokens of a step, shared by all layers with the same RopeConfig."""

    cos: jax.Array  # f32 [T, size / 2]
    sin: jax.Array  # f32 [T, size / 2]


def rotary(rope: RopeConfig, positions: jax.Array) -> Rotary:
    """Compute the rotations of tokens at positions [T], or at [3, T] on three axes."""
    with jax.named_scope("rope"):
        if positions.ndim == 1:
            angles = positions[:, None].astype(jnp.float32) * _frequencies(rope, positions)
        else:
            assert rope.axes is not None and not isinstance(rope.scaling, DynamicScaling), rope
            of_pairs = positions[np.array(rope.axes)].T.astype(jnp.float32)
            angles = of_pairs * inverse_frequencies(rope)
        scale = rope.attention_factor

        def turn(angles: jax.Array) -> Rotary:
            return Rotary(jnp.cos(angles) * scale, jnp.sin(angles) * scale)

        def turn_once(angles: jax.Array) -> Rotary:
            # Without this, XLA:CPU fuses cos and sin into every loop that rotates, and computes
            # them for each head of each layer: a sixth of a decode step. XLA removes a barrier
            # before it fuses loops, but does not move operations out of a conditional.
            never = Rotary(jnp.zeros_like(angles), jnp.zeros_like(angles))
            return jax.lax.cond(jnp.all(angles >= 0), turn, lambda _: never, angles)

        return jax.lax.platform_dependent(angles, cpu=turn_once, default=turn)


def rotate(x: jax.Array, rotations: Rotary) -> jax.Array:
    """Rotate the first elements of heads x [T, heads, H], two for each angle.

    Element i of the first half is paired with element i of the second half.
    """
    cos, sin = rotations.cos[:, None], rotations.sin[:, None]
    size = 2 * cos.shape[-1]
    if size < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :size], rotations), x[..., size:]], axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def inverse_frequencies(rope: RopeConfig) -> np.ndarray:
    """Angle per position of every pair, float32 [size / 2]. For dynamic scaling: within the
    original length."""
    plain = 1.0 / rope.theta ** _exponents(rope.size)
    match rope.scaling:
        case LinearScaling(factor=factor):
            return plain / np.float32(factor)
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(rope, scaling)
        case LongRopeScaling(factors=factors):
            stretched = np.asarray(factors, np.float32) * rope.theta ** _exponents(rope.size)
            return (1.0 / stretched).astype(np.float32)
        case ProportionalScaling(num_pairs=num_pairs, factor=factor):
            is_rotated = np.arange(rope.size // 2) < num_pairs
            return np.where(is_rotated, plain / np.float32(factor), np.float32(0))
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
    # 0 where the original length holds fewer than `low` wavelengths, 1 from `high` on.
    kept = np.clip((scaling.original_max_len / wavelengths - low) / (high - low), 0, 1)
    return ((1 - kept) * plain / scaling.factor + kept * plain).astype(np.float32)


def _yarn(rope: RopeConfig, scaling: YarnScaling) -> np.ndarray:
    def pair_with(num_rotations: float) -> float:
        """The (fractional) pair that makes this many rotations within the original length."""
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
