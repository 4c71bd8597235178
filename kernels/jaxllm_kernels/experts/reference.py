"""The specification of the op: each expert in turn multiplies all tokens. Slow."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.coded import CodedWeight, CodeForm, values
from jaxllm_kernels.dense.api import XLA
from jaxllm_kernels.experts.api import ExpertsConfig, ExpertWeights, between


@dataclass(frozen=True)
class ReferenceExperts:
    """`api.ExpertsOp`, for tests."""

    name: str = "reference"

    def held(self, form: CodeForm, num_outputs: int, num_inputs: int) -> CodeForm:
        return form

    def __call__(
        self,
        x: jax.Array,
        chosen: jax.Array,
        factors: jax.Array,
        weights: ExpertWeights,
        *,
        config: ExpertsConfig,
    ) -> jax.Array:
        gate_up, down = (_plain(weight) for weight in (weights.gate_up, weights.down))
        sums = jnp.zeros(x.shape, jnp.float32)
        for expert in range(len(down)):
            is_choice = chosen == expert
            factor = jnp.sum(jnp.where(is_choice, factors, 0), axis=1, keepdims=True)
            inputs = (x * factor).astype(x.dtype) if config.scales_input else x
            halves = [_product(inputs, matrix) for matrix in gate_up[expert]]
            if weights.gate_up_bias is not None:
                biases = weights.gate_up_bias[expert].astype(jnp.float32)
                halves = [half + bias for half, bias in zip(halves, biases, strict=True)]
            output = _product(between(halves, config).astype(x.dtype), down[expert])
            if weights.down_bias is not None:
                output = output + weights.down_bias[expert].astype(jnp.float32)
            if not config.scales_input:
                output = output * factor
            sums = sums + jnp.where(is_choice.any(axis=1, keepdims=True), output, 0)
        return sums


def _plain(weight: jax.Array | CodedWeight) -> jax.Array:
    return values(weight) if isinstance(weight, CodedWeight) else weight


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The values of codes have 32 bits."""
    return XLA(x.astype(weight.dtype), weight)
