"""Linear layers: weights [out, in], float32 accumulation."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxllm_kernels.dense.api import XLA, Matmul

from jaxllm.parallel.sharding import Axes, Part


@dataclass(frozen=True)
class RoundedMatmul:
    """XLA's product, but rounded to the type of the activations as it is written.

    For layers that round what they get: the sum is the same, and only half as many bytes of it go
    through memory where the product comes from a library (cuBLAS), after which XLA would have to
    round in a kernel of its own. XLA:CPU is slow at such products.
    """

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        if x.dtype == jnp.float32:
            return XLA(x, weight)
        return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))


class Product(nnx.Module):
    """A module that multiplies by its weight; a plan chooses what computes that."""

    matmul: Matmul = XLA


class Linear(Product):
    """y = x W^T + b over the last axis."""

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        bias: bool,
        axes: Axes = (None, None),
        parts: tuple[Part, ...] = (),
        dtype: DTypeLike,
    ):
        """Make the layer; `axes` names those of the weight, [out, in], and `parts` says what it is
        fused of."""
        self.weight = nnx.Param(jnp.zeros((out_size, in_size), dtype), axes=axes, parts=parts)
        self.bias = (
            nnx.Param(jnp.zeros(out_size, dtype), axes=axes[:1], parts=parts) if bias else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.matmul(x, self.weight[...])
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)
