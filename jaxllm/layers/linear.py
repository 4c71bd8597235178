"""Linear layers: weights [out, in], float32 accumulation."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxllm_kernels.dense.api import XLA, Matmul

from jaxllm.parallel.sharding import Axes, Part


class Product(nnx.Module):
    """A module that multiplies by its weight. The plan chooses the implementation, `matmul`."""

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
        """Make the layer. `axes` names the axes of the weight, [out, in]; `parts` lists the tensors
        that it is fused of."""
        self.weight = nnx.Param(jnp.zeros((out_size, in_size), dtype), axes=axes, parts=parts)
        self.bias = (
            nnx.Param(jnp.zeros(out_size, dtype), axes=axes[:1], parts=parts) if bias else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.matmul(x, self.weight[...])
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)
