"""Normalisation layers."""

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxllm_kernels.row_sums.api import RowSums

from jaxllm.parallel.sharding import Axes, Part

# Of the last axis; or of the last axes, if there is a weight for each place in the one before.
Size = int | tuple[int, ...]


class Norm(Protocol):
    """Normalises the last axis."""

    def __call__(self, x: jax.Array) -> jax.Array: ...


class NormSpec(Protocol):
    """The static part of a norm, except its size."""

    def make(
        self,
        size: Size,
        *,
        axes: Axes = (None,),
        parts: tuple[Part, ...] = (),
        dtype: DTypeLike,
    ) -> Norm:
        """Make the norm. `size` is the shape of its weight, `axes` and `parts` are the weight's."""
        ...


class Summing(nnx.Module):
    """A module that adds up rows. The plan may choose how; None: XLA does, in an order that depends
    on the number of rows."""

    row_sums: RowSums | None = None

    def mean(self, x: jax.Array) -> jax.Array:
        """The mean of the last axis, which stays, with a size of one."""
        if self.row_sums is None:
            return jnp.mean(x, axis=-1, keepdims=True)
        return (self.row_sums.total(x) / x.shape[-1])[..., None]

    def mean_square(self, x: jax.Array, wide: jax.Array) -> jax.Array:
        """The mean of the squares of x, whose elements in float32 are `wide`."""
        if self.row_sums is None:
            return jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (self.row_sums.squares(x) / x.shape[-1])[..., None]

    def total(self, x: jax.Array) -> jax.Array:
        """The sum of the last axis, which stays, with a size of one."""
        if self.row_sums is None:
            return jnp.sum(x, axis=-1, keepdims=True)
        return self.row_sums.total(x)[..., None]

    def softmax(self, x: jax.Array) -> jax.Array:
        """The softmax over the last axis, in float32."""
        if self.row_sums is None:
            return jax.nn.softmax(x, axis=-1)
        weights = jnp.exp(x - x.max(axis=-1, keepdims=True))
        return weights / self.total(weights)


@dataclass(frozen=True, kw_only=True)
class RMSNormSpec:
    """The static part of an RMSNorm."""

    eps: float
    # What is added to the weight; Gemma stores weights around zero, and adds one.
    offset: float = 0.0
    # Whether the result is rounded to the activations' dtype before the weight multiplies it, not
    # after. It must be as the model was trained, and matters in 16 bits only.
    rounds_first: bool = True
    has_weight: bool = True

    def make(
        self,
        size: Size,
        *,
        axes: Axes = (None,),
        parts: tuple[Part, ...] = (),
        dtype: DTypeLike,
    ) -> "RMSNorm":
        return RMSNorm(self, size, axes=axes, parts=parts, dtype=dtype)


class RMSNorm(Summing):
    """Scale the last axis to a root mean square of one, then by a weight."""

    def __init__(
        self,
        spec: RMSNormSpec,
        size: Size,
        *,
        axes: Axes = (None,),
        parts: tuple[Part, ...] = (),
        dtype: DTypeLike,
    ):
        self.spec = spec
        self.weight = (
            nnx.Param(jnp.ones(size, dtype), axes=axes, parts=parts) if spec.has_weight else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normal = wide * jax.lax.rsqrt(self.mean_square(x, wide) + self.spec.eps)
        if self.weight is None:
            return normal.astype(x.dtype)
        weight = self.weight[...]
        if self.spec.rounds_first:
            return weight * normal.astype(x.dtype)
        weight = weight.astype(jnp.float32)
        if self.spec.offset:
            weight = weight + self.spec.offset
        return (normal * weight).astype(x.dtype)


@dataclass(frozen=True, kw_only=True)
class LayerNormSpec:
    """The static part of a LayerNorm."""

    eps: float
    # What is added to the weight; Nemotron stores weights around zero, and adds one.
    offset: float = 0.0
    has_weight: bool = True
    has_bias: bool = True

    def make(
        self,
        size: Size,
        *,
        axes: Axes = (None,),
        parts: tuple[Part, ...] = (),
        dtype: DTypeLike,
    ) -> "LayerNorm":
        return LayerNorm(self, size, axes=axes, parts=parts, dtype=dtype)


class LayerNorm(Summing):
    """Scale the last axis to a mean of zero and a variance of one, then by a weight and a bias."""

    def __init__(
        self,
        spec: LayerNormSpec,
        size: Size,
        *,
        axes: Axes = (None,),
        parts: tuple[Part, ...] = (),
        dtype: DTypeLike,
    ):
        self.spec = spec
        self.weight, self.bias = (
            nnx.Param(jnp.full(size, start, dtype), axes=axes, parts=parts) if exists else None
            for start, exists in ((1, spec.has_weight), (0, spec.has_bias))
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide - self.mean(wide)
        variance = self.mean_square(wide, wide)
        y = wide * jax.lax.rsqrt(variance + self.spec.eps)
        if self.weight is not None:
            # The sum is rounded to the weight's dtype, as in training.
            weight = self.weight[...] + self.spec.offset if self.spec.offset else self.weight[...]
            y = y * weight.astype(jnp.float32)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)
