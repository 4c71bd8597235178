"""The state on the device. It is donated to each step and replaced by the step's result."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.layers.context import Cache
from jaxllm.layers.state import States
from jaxllm.models.specs import Caches
from jaxllm.parallel.sharding import place, sharding
from jaxllm.plan.between_steps import place_slots
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.plan.stages import StagePlan
from jaxllm.sampling.slot_state import SlotState
from jaxllm.speculation.drafters import make_drafter


def abstract_drafts(plan: EnginePlan, mesh: Mesh) -> tuple[Any, Any]:
    """Shapes and shardings of the drafts and of the drafter's tables."""
    speculation = plan.speculation
    assert speculation is not None
    num_slots, everywhere = plan.max_num_seqs, sharding(mesh)
    drafts = jax.ShapeDtypeStruct((num_slots, speculation.num_drafts), jnp.int32)
    if plan.draft is not None:
        caches: Any = plan.draft.cache_shapes
        before: Any = jax.ShapeDtypeStruct((num_slots,), jnp.int32)
        size = plan.architecture.hidden_size
        hidden: Any = jax.ShapeDtypeStruct((num_slots, size), plan.dtype)
        drafts, before, hidden = place((drafts, before, hidden), everywhere)
        if plan.draft_head is not None:
            behind: Any = None
            if plan.verifies_late:
                shape = (*speculation.most_drafts, size)
                behind = place(jax.ShapeDtypeStruct(shape, plan.dtype), everywhere)
            return drafts, DraftHeadState(caches=caches, hidden=hidden, behind=behind)
        return drafts, DraftModelState(caches=caches, before=before)
    tables = make_drafter(speculation).abstract(plan.max_num_seqs, plan.max_model_len)
    return jax.tree.map(lambda leaf: place(leaf, everywhere), (drafts, tables))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelState:
    """What a draft model keeps."""

    caches: tuple[jax.Array, ...]  # as those of the model, in the blocks of its first cache group
    before: jax.Array  # i32 [S]: the token before the newest of each slot's request


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHeadState:
    """What a head that drafts keeps."""

    caches: Caches  # in the blocks of the cache groups with its layer's windows
    # [S, D]: what the head has entered of the model's hidden state at the token before the newest.
    hidden: jax.Array
    # Only if late rows may have drafts, [M, k, D]: likewise at the drafts of the rows with drafts
    # of the newest step, until the second program has verified those of late rows.
    behind: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """The runner owns the state and alone keeps a reference, since every step consumes it.

    Each stage of a pipeline has a state. Only the last stage's state has the fields for sampling.
    """

    # KV pages, one array per layer, in the backend's layout; then the states of mixers without
    # attention, arrays [S, ...]. A row that begins a request takes zeros for its slot's state, so
    # nothing clears a slot that passes on.
    caches: tuple[Cache, ...]
    tokens: jax.Array | None  # i32 [S]: the token that each slot sampled last
    # i32 [S]: how many tokens of each slot's request are in the caches. A row that goes on begins
    # there, so the host can plan the next step without knowing where this one ended.
    lengths: jax.Array
    block_tables: jax.Array  # i32 [G * S, P], of each cache group for each slot (`table_row`)
    slots: SlotState | None  # the sampler's tables
    # Only in an engine that speculates: what the drafter has proposed for each slot, i32 [S, k],
    # and its own tables.
    drafts: jax.Array | None = None
    drafter: Any = None
    # Only where requests share prefixes that have states: copies of the states, arrays [N, ...].
    snapshots: tuple[States, ...] | None = None
    # Only in an engine that pools: what it keeps of each slot's prompt so far, f32 [S, D].
    sums: jax.Array | None = None
    # Only in an engine that sees images or takes embeddings: a row for each token of those that are
    # encoded or given, [rows, outputs * D].
    given: jax.Array | None = None

    @classmethod
    def abstract(cls, plan: EnginePlan, stage: StagePlan) -> "DeviceState":
        """Shapes, for compiling and planning."""
        slots, samples = plan.max_num_seqs, stage.part.has_head
        num_tables = len(plan.cache_groups) * slots
        tables = jax.ShapeDtypeStruct((num_tables, plan.blocks_per_seq), jnp.int32)
        lengths = jax.ShapeDtypeStruct((slots,), jnp.int32)
        shapes: dict[str, Any] = {
            "caches": (*stage.cache_shapes, *stage.state_shapes),
            "tokens": abstract_tokens(plan, stage) if samples else None,
            "lengths": place(lengths, sharding(stage.mesh)),
            "block_tables": place(tables, sharding(stage.mesh)),
            "slots": place_slots(stage.mesh, slots, plan.num_logits, plan.max_model_len)
            if samples and not plan.pooling
            else None,
        }
        if plan.snapshots is not None:
            shapes["snapshots"] = stage.snapshot_shapes
        if plan.pooling is not None and plan.pooling.needs_whole_prompts and samples:
            sums = jax.ShapeDtypeStruct((slots, plan.architecture.hidden_size), jnp.float32)
            shapes["sums"] = place(sums, sharding(stage.mesh))
        if plan.num_given_rows:
            size = (plan.num_given_rows, plan.architecture.image_width)
            shapes["given"] = place(jax.ShapeDtypeStruct(size, plan.dtype), sharding(stage.mesh))
        if plan.speculation is not None:
            shapes["drafts"], shapes["drafter"] = abstract_drafts(plan, stage.mesh)
        return cls(**shapes)

    @classmethod
    def zeros(cls, plan: EnginePlan, stage: StagePlan) -> "DeviceState":
        """The state of a new engine; traced."""
        shapes = cls.abstract(plan, stage)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def abstract_tokens(plan: EnginePlan, stage: StagePlan) -> jax.ShapeDtypeStruct:
    """The shape of the table of last sampled tokens, on a stage's devices."""
    shape = jax.ShapeDtypeStruct((plan.max_num_seqs,), jnp.int32)
    return place(shape, sharding(stage.mesh))
