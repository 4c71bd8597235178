"""The experts in XLA, for every platform: a loop over the experts that any token has chosen.

An expert's tokens are gathered some at a time, as many times as needed. So the time depends on the
chosen experts and their tokens. No expert multiplies tokens of others, and no weights are gathered,
other than those of one expert. On TPUs and GPUs it is correct, and slower than a kernel would be:
each expert is a round of small operations.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.dense.api import XLA
from jaxllm_kernels.experts.api import ExpertsConfig, ExpertWeights, activate

# Tokens of an expert that are multiplied at a time: the mean per expert, within these bounds.
_FEWEST, _MOST = 16, 128


@dataclass(frozen=True)
class XlaExperts:
    """`api.ExpertsOp` on every platform."""

    name: str = "xla"

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
        num_experts = len(weights.down)
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
            output = _run(rows, factor, expert, weights, config)
            return sums.at[tokens].add(output, mode="drop", unique_indices=True)

        def run_expert(index: jax.Array, sums: jax.Array) -> jax.Array:
            expert = touched[index]
            num_pieces = (counts[expert] + size - 1) // size
            return jax.lax.fori_loop(
                0, num_pieces, lambda i, s: compute(expert, edges[expert] + i * size, s), sums
            )

        sums = jnp.zeros(x.shape, jnp.float32)
        return jax.lax.fori_loop(0, jnp.sum(counts > 0), run_expert, sums)


XLA_EXPERTS = XlaExperts()


def _run(
    rows: jax.Array,
    factor: jax.Array,
    expert: jax.Array,
    weights: ExpertWeights,
    config: ExpertsConfig,
) -> jax.Array:
    """The weighted output of an expert for some of its tokens."""
    if config.scales_input:
        rows = (rows * factor).astype(rows.dtype)
    _, _, size, hidden_size = weights.gate_up.shape
    gate_up = XLA(rows, _of_expert(weights.gate_up, expert).reshape(2 * size, hidden_size))
    if weights.gate_up_bias is not None:
        gate_up = gate_up + weights.gate_up_bias[expert].reshape(-1).astype(jnp.float32)
    inner = activate(gate_up[:, :size], gate_up[:, size:], config).astype(rows.dtype)
    output = XLA(inner, _of_expert(weights.down, expert))
    if weights.down_bias is not None:
        output = output + weights.down_bias[expert].astype(jnp.float32)
    return output if config.scales_input else output * factor


def _of_expert(weights: jax.Array, expert: jax.Array) -> jax.Array:
    """The weights of an expert. Without the barrier XLA:CPU would widen those of all experts from
    bfloat16 to float32 before the loop."""
    weights, expert = jax.lax.optimization_barrier((weights, expert))
    return weights[expert]


def _piece_size(mean: int) -> int:
    """The power of two that is at least the mean number of tokens of an expert, within bounds."""
    return min(max(1 << (mean - 1).bit_length() if mean > 1 else 1, _FEWEST), _MOST)
