"""What stays on the device from step to step. Donated to each step and replaced by its result."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.parallel.sharding import place, sharding
from jaxllm.runner.plan import EnginePlan
from jaxllm.sampling.slot_state import SlotState


def abstract_slots(mesh: Mesh, num_slots: int, num_logits: int) -> SlotState:
    """Shapes and places of the sampler's tables."""
    tables = SlotState.abstract(num_slots, num_logits)
    return dataclasses.replace(
        tables,
        **{
            field.name: place(
                getattr(tables, field.name),
                sharding(mesh, SlotState.AXES.get(field.name, ())),
            )
            for field in dataclasses.fields(SlotState)
        },
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """Owned by the runner: nobody else keeps a reference, since every step consumes it."""

    caches: tuple[jax.Array, ...]  # KV pages, one array per layer, in the backend's layout
    tokens: jax.Array  # i32 [S]: the token that each slot sampled last
    block_tables: jax.Array  # i32 [S, P]
    slots: SlotState  # sampler state of requests that need some

    @classmethod
    def abstract(cls, plan: EnginePlan) -> "DeviceState":
        """Shapes, for compiling and planning."""
        slots = plan.max_num_seqs
        on_mesh = functools.partial(place, sharding=sharding(plan.mesh))
        shapes: dict[str, Any] = {
            "caches": plan.cache_shapes,
            "tokens": on_mesh(jax.ShapeDtypeStruct((slots,), jnp.int32)),
            "block_tables": on_mesh(jax.ShapeDtypeStruct((slots, plan.blocks_per_seq), jnp.int32)),
            "slots": abstract_slots(plan.mesh, slots, plan.num_logits),
        }
        return cls(**shapes)

    @classmethod
    def zeros(cls, plan: EnginePlan) -> "DeviceState":
        """The state of an engine that has seen nothing; traced."""
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cls.abstract(plan))
