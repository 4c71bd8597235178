"""The layers behind a pooled hidden state: small, in float32, and whole on every device."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.activation import ACTIVATIONS
from jaxllm.layers.linear import Product
from jaxllm.layers.norm import Norm, NormSpec


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """What is static about a layer."""

    name: str  # of the module
    out_size: int
    bias: bool
    activation: str | None = None
    folder: str | None = None  # of its own file in the checkpoint; None: it is in the model's
    stored_as: str | None = None  # its name there, if it is another one

    def make(self, in_size: int, *, dtype: DTypeLike) -> "Dense":
        return Dense(self, in_size, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class HeadNormSpec:
    """A norm between such layers."""

    name: str
    out_size: int
    norm: NormSpec
    folder: None = None
    stored_as: None = None

    def make(self, in_size: int, *, dtype: DTypeLike) -> Norm:
        assert in_size == self.out_size, self
        return self.norm.make(in_size, dtype=dtype)


class Dense(Product):
    """y = activation(x W^T + b), of f32 [n, in]."""

    def __init__(self, spec: DenseSpec, in_size: int, *, dtype: DTypeLike):
        self.activation = spec.activation
        weight = jnp.zeros((spec.out_size, in_size), dtype)
        self.weight = nnx.Param(weight, axes=(None, None))
        bias = jnp.zeros(spec.out_size, dtype)
        self.bias = nnx.Param(bias, axes=(None,)) if spec.bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.matmul(x, self.weight[...].astype(jnp.float32))
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y if self.activation is None else ACTIVATIONS[self.activation](y)
