"""Feed-forward networks of two or three matrices."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.errors import refused
from jaxllm.layers.activation import ACTIVATIONS
from jaxllm.layers.context import StepContext
from jaxllm.layers.linear import Linear
from jaxllm.parallel.sharding import Part


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """The static part of a layer's MLP."""

    name: ClassVar[str] = "mlp"

    intermediate_size: int
    bias: bool = False
    activation: str = "silu"  # one of ACTIVATIONS
    # Whether a third matrix makes the factors of what the activation lets through.
    is_gated: bool = True
    # What multiplies the gate before its activation, and the output, of a gated MLP.
    gate_scale: float = 1.0
    output_scale: float = 1.0

    def check(self, num_shards: int) -> None:
        if self.intermediate_size % num_shards:
            raise refused(
                "tensor_parallel_size",
                num_shards,
                f"it does not divide the model's intermediate_size={self.intermediate_size}",
            )

    def make(self, hidden_size: int, *, num_shards: int, dtype: DTypeLike) -> "GatedMLP | MLP":
        module = GatedMLP if self.is_gated else MLP
        return module(self, hidden_size, num_shards=num_shards, dtype=dtype)


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one matmul."""

    def __init__(self, spec: MLPSpec, hidden_size: int, *, num_shards: int, dtype: DTypeLike):
        self.num_shards = num_shards
        self.spec = spec
        size = spec.intermediate_size
        self.gate_up_proj = Linear(
            hidden_size,
            2 * size,
            bias=spec.bias,
            axes=("mlp", "hidden"),
            parts=(Part(size), Part(size)),
            dtype=dtype,
        )
        self.down_proj = Linear(
            size, hidden_size, bias=spec.bias, axes=("hidden", "mlp"), dtype=dtype
        )

    def __call__(self, x: jax.Array, context: StepContext) -> jax.Array:
        with jax.named_scope("mlp"):
            shards = self.gate_up_proj(x).reshape(len(x), self.num_shards, -1)
            gate, up = jnp.split(shards, 2, axis=-1)
            gate = gate.astype(jnp.float32)
            if self.spec.gate_scale != 1.0:
                gate = gate * self.spec.gate_scale
            product = (ACTIVATIONS[self.spec.activation](gate) * up).astype(x.dtype)
            y = self.down_proj(product.reshape(len(x), -1))
            return y if self.spec.output_scale == 1.0 else y * self.spec.output_scale


class MLP(nnx.Module):
    """down(activation(up(x)))."""

    def __init__(self, spec: MLPSpec, hidden_size: int, *, num_shards: int, dtype: DTypeLike):
        self.activation = spec.activation
        size = spec.intermediate_size
        self.up_proj = Linear(
            hidden_size, size, bias=spec.bias, axes=("mlp", "hidden"), dtype=dtype
        )
        self.down_proj = Linear(
            size, hidden_size, bias=spec.bias, axes=("hidden", "mlp"), dtype=dtype
        )

    def __call__(self, x: jax.Array, context: StepContext) -> jax.Array:
        with jax.named_scope("mlp"):
            passed = ACTIVATIONS[self.activation](self.up_proj(x).astype(jnp.float32))
            return self.down_proj(passed.astype(x.dtype))
