"""The bytes that a device holds between steps, beside weights, caches, states and adapters.

These are the tables of the device state, and what steps leave: of those in flight, and of the next
one. They have the shapes of the step with the most tokens.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxllm.layers.state import Drafts, StateConfig
from jaxllm.models.part import ModelPart
from jaxllm.parallel.sharding import device_bytes, place, sharding
from jaxllm.plan.buckets import Bucket
from jaxllm.plan.draft_head import DraftHeadPlan
from jaxllm.plan.draft_plan import DraftPlan
from jaxllm.pooler_config import Pooling
from jaxllm.sampling.slot_state import SlotState
from jaxllm.speculation.drafters import make_drafter
from jaxllm.speculative_config import Speculation

_NUMBER = 4  # bytes of an int32 or a float32


@dataclass(frozen=True, kw_only=True)
class BetweenSteps:
    """What a device of a stage holds."""

    # What layers with states keep of the drafts of a step until its late rows are sampled: shapes
    # over all devices.
    kept: tuple[tuple[Drafts, ...], ...]
    tables_bytes: int  # of the device state beside caches, states and snapshots
    steps_bytes: int  # of what the steps in flight leave, and the next one

    @property
    def num_bytes(self) -> int:
        return self.tables_bytes + self.steps_bytes


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """What determines these bytes, of all stages."""

    num_stages: int
    num_slots: int
    num_cache_groups: int
    blocks_per_seq: int
    max_model_len: int
    num_logits: int
    num_logprobs: int  # the most that a step computes for a position
    samples_late: bool
    host_reads_logits: bool
    hidden_size: int
    itemsize: int  # of the model's type
    largest: Bucket  # the step with the most tokens and rows
    given_bytes: int = 0  # of embeddings that are given in place of those of tokens
    counted_experts: int = 0  # layers x experts whose tokens steps count
    pooling: Pooling | None = None  # None: steps sample
    speculation: Speculation | None = None
    draft: DraftPlan | None = None

    def of_stage(
        self, mesh: Mesh, part: ModelPart, state_configs: Sequence[StateConfig]
    ) -> BetweenSteps:
        """What a stage has on each device."""
        kept: tuple[Any, ...] = ()
        if self.verifies_late:
            assert self.speculation is not None
            num_drafts = math.prod(self.speculation.most_drafts)
            kept = tuple(config.kept(num_drafts, mesh) for config in state_configs)
        return BetweenSteps(
            kept=kept,
            tables_bytes=self._tables(mesh, has_head=part.has_head),
            steps_bytes=self._steps(mesh, part, kept),
        )

    @property
    def verifies_late(self) -> bool:
        its = self.speculation
        return self.samples_late and its is not None and its.verifies_late

    def _tables(self, mesh: Mesh, *, has_head: bool) -> int:
        """The bytes of the device state's tables."""
        slots = self.num_slots
        # The lengths, and the block tables.
        numbers = slots + self.num_cache_groups * slots * self.blocks_per_seq
        if has_head:
            numbers += slots  # the last tokens
            if self.pooling is not None and self.pooling.needs_whole_prompts:
                numbers += slots * self.hidden_size
        of_sampler = 0
        if has_head and self.pooling is None:
            its = place_slots(mesh, slots, self.num_logits, self.max_model_len)
            of_sampler = sum(map(device_bytes, jax.tree.leaves(its)))
        return _NUMBER * numbers + of_sampler + self.given_bytes + self._drafting()

    def _steps(self, mesh: Mesh, part: ModelPart, kept: Sequence[Any]) -> int:
        """The bytes of what steps leave, and of what stages pass on."""
        rows, tokens = self.largest.num_rows, self.largest.num_tokens
        of_step = _NUMBER * self.counted_experts
        # Each step in flight has hidden states that come in, and some that go out.
        num_sides = (not part.embeds) + (not part.has_head)
        of_step += num_sides * tokens * self.hidden_size * self.itemsize
        if part.has_head:
            of_step += self._pooled(rows, tokens) if self.pooling else self._sampled(mesh)
            of_step += sum(map(device_bytes, jax.tree.leaves(kept)))
        # The first stage of a pipeline has copies of the last one's tokens.
        has_copies = part.embeds and self.num_stages > 1
        copies = (self.num_stages + 2) * self.num_slots if has_copies else 0
        return (1 + self.num_stages) * of_step + _NUMBER * copies

    def _drafting(self) -> int:
        its, slots = self.speculation, self.num_slots
        if its is None:
            return 0
        drafts = _NUMBER * slots * its.num_drafts
        row = self.hidden_size * self.itemsize
        if isinstance(self.draft, DraftHeadPlan):
            behind = math.prod(its.most_drafts) if self.verifies_late else 0
            return drafts + (slots + behind) * row
        if self.draft is not None:
            return drafts + _NUMBER * slots
        tables = jax.tree.leaves(make_drafter(its).abstract(slots, self.max_model_len))
        return drafts + sum(table.size * table.dtype.itemsize for table in tables)

    def _pooled(self, rows: int, tokens: int) -> int:
        assert self.pooling is not None
        return _NUMBER * (rows + (rows + tokens) * self.pooling.size)

    def _sampled(self, mesh: Mesh) -> int:
        rows, its = self.largest.num_rows, self.speculation
        # Ids and values, a rank and a normaliser.
        of_position = _NUMBER * (2 * (1 + self.num_logprobs) + 2)
        left, behind, ahead = rows * (_NUMBER + of_position), 0, 0
        if its is not None:
            left += rows * (_NUMBER * (2 + its.num_drafts) + its.num_drafts * of_position)
        if self.verifies_late:
            assert its is not None
            behind = min(rows, its.max_rows) * its.num_drafts
            # What is proposed after late rows, or drafted ahead of them.
            ahead = _NUMBER * its.num_drafts * (rows if its.proposes else its.max_rows)
        logits = 0
        if self.samples_late or self.host_reads_logits:
            placed = logits_sharding(mesh, host_reads=self.host_reads_logits)
            logits = _NUMBER * math.prod(placed.shard_shape((rows + behind, self.num_logits)))
        # The program for late rows leaves all of this once more, but no logits.
        left += left * self.samples_late
        return left + ahead + logits + self.largest.num_tokens * of_position


def place_slots(mesh: Mesh, num_slots: int, num_logits: int, max_model_len: int) -> SlotState:
    """Shapes and shardings of the sampler's tables."""
    tables = SlotState.abstract(num_slots, num_logits, max_model_len)
    return SlotState(
        **{
            field.name: place(
                getattr(tables, field.name), sharding(mesh, SlotState.AXES.get(field.name, ()))
            )
            for field in dataclasses.fields(SlotState)
        }
    )


def logits_sharding(mesh: Mesh, *, host_reads: bool) -> NamedSharding:
    """The sharding of the logits that a step leaves, f32 [R, V]: by vocabulary, as they are
    computed. If several processes have devices of the mesh and each reads the logits, every device
    has all of them."""
    return sharding(mesh, () if host_reads and mesh.is_multi_process else (None, "vocab"))
