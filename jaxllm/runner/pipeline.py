"""The stages of a model one after the other, with a step in flight in each.

The host dispatches a step to all stages at once. Each stage's program waits on its devices for the
hidden states of the stage before, which go from mesh to mesh without the host. So the stages
overlap by themselves if steps do not wait for each other's tokens. After each step the last stage's
table of sampled tokens is copied to the first stage. A step takes the oldest copy that has all
tokens it goes on from. A newer copy would be correct too, but the step would wait for it.
"""

import dataclasses
from collections import deque

import jax
import numpy as np

from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.runner.late import LateKey, Left, Unsampled
from jaxllm.runner.outputs import StageOutputs, StepOutputs
from jaxllm.runner.packer import PackedStep
from jaxllm.runner.stage import Stage
from jaxllm.sampling.slot_state import SlotRow


class Pipeline:
    """Runs a model of several stages, as Stage runs a model of one."""

    def __init__(self, plan: EnginePlan, stages: list[Stage]):
        self._stages = stages
        self._first, *self._others = stages
        no_tokens = np.zeros(plan.max_num_seqs, np.int32)
        self._no_tokens = jax.device_put(no_tokens, self._first.everywhere)
        # (step, table copied after it), oldest first. Older steps than these have certainly ended.
        self._tokens: deque[tuple[int, jax.Array]] = deque(maxlen=len(stages) + 1)

    def run(self, packed: PackedStep) -> StepOutputs:
        """Dispatch a step on all stages."""
        left = self._first.run(packed, self._tokens_since(packed.carried_from))
        expert_tokens = left.expert_tokens
        for stage in self._others:
            assert isinstance(left, StageOutputs)
            left = stage.run(packed, jax.device_put(left.hidden, stage.everywhere))
            expert_tokens += left.expert_tokens
        self._copy_tokens(packed.step)
        assert isinstance(left, StepOutputs)
        return dataclasses.replace(left, expert_tokens=expert_tokens)

    def sample_late(
        self, key: LateKey, left: Left, unsampled: Unsampled, packed: np.ndarray
    ) -> Left:
        """Sample the late rows of the newest step, which has left these outputs. Return its
        outputs, complete."""
        left = self._stages[-1].sample_late(key, left, unsampled, packed)
        step, _ = self._tokens.pop()  # a table that lacks the tokens of these rows
        self._copy_tokens(step)
        return left

    def write_slot(self, slot: int, row: SlotRow) -> None:
        """Set what the sampler keeps about the request in a slot."""
        self._stages[-1].write_slot(slot, row)

    def write_block_tables(self, updates: np.ndarray) -> None:
        """Apply the block-table changes that a step has no room for, i32 [n, 3]."""
        for stage in self._stages:
            stage.write_block_tables(updates)

    def reset(self) -> None:
        """Start over with an empty cache, after a step has failed and its state is lost."""
        self._tokens.clear()
        for stage in self._stages:
            stage.reset()

    def free(self) -> None:
        """Free the devices' memory. Nothing can run any more."""
        self._tokens.clear()
        for stage in self._stages:
            stage.free()

    def _copy_tokens(self, step: int) -> None:
        """Copy the table as it is after this step to the first stage."""
        tokens = jax.device_put(self._stages[-1].tokens, self._first.everywhere)
        self._tokens.append((step, tokens))

    def _tokens_since(self, step: int | None) -> jax.Array:
        """The oldest table that has what this step sampled; for None, the newest table."""
        if step is None:
            return self._tokens[-1][1] if self._tokens else self._no_tokens
        return next((table for after, table in self._tokens if after >= step), self._no_tokens)
