"""Normalisation layers."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """The static part of a norm, except its size."""

    eps: float

    def make(self, size: int, *, dtype: DTypeLike) -> "RMSNorm":
        return RMSNorm(size, eps=self.eps, dtype=dtype)


class RMSNorm(nnx.Module):
    """Scale the last axis to a root mean square of one, then by a weight."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones(size, dtype), axes=(None,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        # Round to the activations' dtype before the weight, as the models were trained.
        return self.weight[...] * (wide * jax.lax.rsqrt(mean_square + self.eps)).astype(x.dtype)
