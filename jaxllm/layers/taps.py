"""The weights of a short causal convolution of each channel."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.parallel.sharding import Part


class Taps(nnx.Module):
    """The weights [C, W] and the biases [C] of channels, which are cut with the heads."""

    def __init__(
        self, channels: int, width: int, *, parts: tuple[Part, ...], bias: bool, dtype: DTypeLike
    ):
        self.weight = nnx.Param(
            jnp.zeros((channels, width), dtype), axes=("heads", None), parts=parts
        )
        self.bias = (
            nnx.Param(jnp.zeros(channels, dtype), axes=("heads",), parts=parts) if bias else None
        )
