"""Linear layers: weights [out, in], float32 accumulation."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.parallel.sharding import Axes, Part


class Linear(nnx.Module):
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
        y = matmul(x, self.weight[...])
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] times weight [out, in], as float32 [..., out]."""
    # Accelerators multiply float32 in fewer bits unless told otherwise; who asks for float32
    # means it.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
