"""By two plain products over the matrices of all slots.

Each token is multiplied by the A of every slot, and what is not its own becomes zero before the
product with B. The work grows with slots times rank, and stays a small part of the layer's own
product while that is small beside the layer's sizes. To gather matrices for each token moves far
more bytes: at 256 tokens of 1024 inputs it took five times as long on a CPU.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.low_rank.api import LowRank


@dataclass(frozen=True)
class XlaLowRank:
    """`api.LowRankOp` by XLA."""

    def __call__(self, x: jax.Array, weights: LowRank, slots: jax.Array) -> jax.Array:
        return _by_all_slots(x, weights, slots)


def _by_all_slots(x: jax.Array, weights: LowRank, slots: jax.Array) -> jax.Array:
    inner = jnp.einsum("td,nprd->tnpr", x, weights.a, preferred_element_type=jnp.float32)
    is_own = slots[:, None] == jnp.arange(weights.num_slots, dtype=slots.dtype)
    inner = jnp.where(is_own[:, :, None, None], inner, 0).astype(x.dtype)
    parts = [
        jnp.einsum("tnr,nrsc->tsc", inner[:, :, part], b, preferred_element_type=jnp.float32)
        for part, b in enumerate(weights.b)
    ]
    return jnp.concatenate(parts, axis=-1).reshape(len(x), -1)
