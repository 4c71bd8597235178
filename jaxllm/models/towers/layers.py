"""What the layers of towers need of a step: its rows are images or parts of them, and nothing is
cached."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch

from jaxllm.layers.context import PagedBatch, StepContext
from jaxllm.layers.rope import RopeConfig, Rotary, inverse_frequencies
from jaxllm.layers.state import StateOps


def tower_context(
    starts: jax.Array, rotary: Rotary | None, ops: StateOps, mesh: Mesh | None
) -> StepContext:
    """The context of layers whose patches see those of their row, [starts[r], starts[r + 1])."""
    batch = RaggedBatch(
        query_starts=starts,
        context_lens=jnp.diff(starts),
        block_tables=jnp.zeros((len(starts) - 1, 1), jnp.int32),
        num_decodes=jnp.int32(0),
        block_size=1,
        decode_only=False,
    )
    return StepContext(
        windows=(None,),
        paged=(PagedBatch(batch, None),),
        backend=None,  # pyright: ignore[reportArgumentType]  (no layer has a cache)
        mesh=mesh,
        state_ops=ops,
        rotary=rotary,
    )


def rotated_in_quarters(head_size: int, theta: float, places: jax.Array) -> Rotary:
    """The rotations of patches at rows and columns [P, 2]. The first half of a head's pairs is of
    rows, the second half of columns, and both have the same frequencies."""
    frequencies = inverse_frequencies(RopeConfig(size=head_size // 2, theta=theta))
    angles = places[:, :, None].astype(jnp.float32) * frequencies
    angles = angles.reshape(len(places), -1)
    return Rotary(jnp.cos(angles), jnp.sin(angles))


def _layer(graphdef: Any, weights: nnx.State, hidden: jax.Array, context: StepContext) -> jax.Array:
    return nnx.merge(graphdef, weights)(hidden, context)


_run_split = jax.jit(_layer, static_argnums=0)


def run_layer(layer: Any, hidden: jax.Array, context: StepContext) -> jax.Array:
    """Run a layer of a tower. Layers of equal structure are traced and lowered only once."""
    graphdef, weights = nnx.split(layer)
    return _run_split(graphdef, weights, hidden, context)
