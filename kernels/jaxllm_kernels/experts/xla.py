"""The experts in XLA, for every platform: a loop over the experts that any token has chosen.

An expert's tokens are gathered some at a time, as many times as needed. So the time depends on the
chosen experts and their tokens. No expert multiplies tokens of others, and no weights are gathered,
other than those of one expert. On TPUs and GPUs it is correct, and slower than a kernel would be:
each expert is a round of small operations.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.coded import CodedWeight, CodeForm
from jaxllm_kernels.dense.api import XLA
from jaxllm_kernels.dense.xla import XlaCodedMatmul
from jaxllm_kernels.experts.api import ExpertsConfig, ExpertWeights, between

# Tokens of an expert that are multiplied at a time: the mean per expert, within these bounds.
_FEWEST, _MOST = 16, 128


@dataclass(frozen=True)
class XlaExperts:
    """`api.ExpertsOp` on every platform."""

    name: str = "xla"
    coded: XlaCodedMatmul = XlaCodedMatmul()

    def held(self, form: CodeForm, num_outputs: int, num_inputs: int) -> CodeForm:
        return self.coded.held(form, num_outputs, num_inputs)

    def __call__(
        self,
        x: jax.Array,
        chosen: jax.Array,
        factors: jax.Array,
        weights: ExpertWeights,
        *,
        config: ExpertsConfig,
    ) -> jax.Array:
        num_tokens, num_choices = chosen.shape
        num_experts = weights.num_experts
        # The choices in the order of their experts; those that are no expert's come last.
        is_expert = (chosen >= 0) & (chosen < num_experts)
        experts = jnp.where(is_expert, chosen, num_experts).reshape(-1)
        order = jnp.argsort(experts, stable=True)
        edges = jnp.searchsorted(experts[order], jnp.arange(num_experts + 1)).astype(jnp.int32)
        counts = edges[1:] - edges[:-1]
        touched = jnp.argsort(counts == 0, stable=True)
        size = _piece_size(num_tokens * num_choices // num_experts)

        def compute(expert: jax.Array, start: jax.Array, sums: jax.Array) -> jax.Array:
            """Add what the expert computes of its choices from `start` on."""
            places = start + jnp.arange(size)
            choices = order.at[places].get(mode="clip")
            # Indices of tokens that are not there are different from each other, too.
            absent = num_tokens + jnp.arange(size)
            tokens = jnp.where(places < edges[expert + 1], choices // num_choices, absent)
            factor = factors.reshape(-1)[choices][:, None]
            rows = x.at[tokens].get(mode="fill", fill_value=0)
            output = self._run(rows, factor, expert, weights, config)
            return sums.at[tokens].add(output, mode="drop", unique_indices=True)

        def run_expert(index: jax.Array, sums: jax.Array) -> jax.Array:
            expert = touched[index]
            num_pieces = (counts[expert] + size - 1) // size
            return jax.lax.fori_loop(
                0, num_pieces, lambda i, s: compute(expert, edges[expert] + i * size, s), sums
            )

        sums = jnp.zeros(x.shape, jnp.float32)
        return jax.lax.fori_loop(0, jnp.sum(counts > 0), run_expert, sums)

    def _run(
        self,
        rows: jax.Array,
        factor: jax.Array,
        expert: jax.Array,
        weights: ExpertWeights,
        config: ExpertsConfig,
    ) -> jax.Array:
        """The weighted output of an expert for some of its tokens."""
        if config.scales_input:
            rows = (rows * factor).astype(rows.dtype)
        weights = _of_expert(weights, expert)
        # Gate, then up; or up alone.
        both = jax.tree.map(lambda half: half.reshape(-1, half.shape[-1]), weights.gate_up)
        gate_up = self._product(rows, both)
        if weights.gate_up_bias is not None:
            gate_up = gate_up + weights.gate_up_bias.reshape(-1).astype(jnp.float32)
        halves = jnp.split(gate_up, config.num_halves, axis=-1)
        inner = between(halves, config).astype(rows.dtype)
        output = self._product(inner, weights.down)
        if weights.down_bias is not None:
            output = output + weights.down_bias.astype(jnp.float32)
        return output if config.scales_input else output * factor

    def _product(self, x: jax.Array, weight: jax.Array | CodedWeight) -> jax.Array:
        return self.coded(x, weight) if isinstance(weight, CodedWeight) else XLA(x, weight)


XLA_EXPERTS = XlaExperts()


def _of_expert(weights: ExpertWeights, expert: jax.Array) -> ExpertWeights:
    """The weights of an expert. Without the barrier XLA:CPU would widen those of all experts from
    bfloat16 to float32 before the loop."""
    weights, expert = jax.lax.optimization_barrier((weights, expert))
    return jax.tree.map(lambda array: array[expert], weights)


def _piece_size(mean: int) -> int:
    """The power of two that is at least the mean number of tokens of an expert, within bounds."""
    return min(max(1 << (mean - 1).bit_length() if mean > 1 else 1, _FEWEST), _MOST)
