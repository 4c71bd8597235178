"""Runs Schedules: pack, run, carry, unpack. Owns the weights, the device state and the programs.

The device runs steps in the order in which they are dispatched, and `execute` returns as soon as a
step is dispatched; so the host plans the next step while this one runs, and reads the tokens one
step later. Only this class holds the device state: each step consumes it and leaves a new one.
"""

import time
from typing import Any

import jax
import numpy as np

from jaxllm.logging import init_logger
from jaxllm.runner.bundle import load_programs
from jaxllm.runner.compile import Programs, compilation_counter
from jaxllm.runner.memory import format_bytes, peak_host_bytes
from jaxllm.runner.plan import EnginePlan
from jaxllm.runner.programs import (
    MAKE_STATE,
    TABLE_WRITES,
    WRITE_SLOT,
    WRITE_TABLES,
    declare_programs,
    make_packer,
)
from jaxllm.runner.state import DeviceState
from jaxllm.runner.step import StepOutputs
from jaxllm.sampling.slot_state import slot_row
from jaxllm.scheduler.schedule import LogprobArrays, Schedule, StepResult
from jaxllm.weights.loader import load_weights

logger = init_logger(__name__)


class PendingStep:
    """A dispatched step whose outputs are on their way to the host."""

    def __init__(self, schedule: Schedule, outputs: StepOutputs):
        self._outputs = outputs
        self._wants_logprobs = schedule.wants_logprobs
        self._wants_prompt_logprobs = schedule.prompt_targets is not None
        for array in jax.tree.leaves(self._wanted()):
            array.copy_to_host_async()

    def result(self) -> StepResult:
        """Wait for the device and hand over numpy arrays."""
        tokens, logprobs, prompt_logprobs = jax.tree.map(np.asarray, self._wanted())
        return StepResult(
            token_ids=tokens,
            logprobs=LogprobArrays(*logprobs) if logprobs else None,
            prompt_logprobs=LogprobArrays(*prompt_logprobs) if prompt_logprobs else None,
        )

    def _wanted(self) -> tuple[Any, Any, Any]:
        outputs = self._outputs
        return (
            outputs.tokens,
            _columns(outputs.logprobs) if self._wants_logprobs else None,
            _columns(outputs.prompt_logprobs) if self._wants_prompt_logprobs else None,
        )


class ModelRunner:
    """One model on its devices."""

    def __init__(self, plan: EnginePlan):
        self._plan = plan
        abstract = plan.model_class.abstract(plan.architecture, plan.dtype, plan.mesh.size)
        self._packer = make_packer(plan)
        declared = declare_programs(plan, self._packer.layouts)
        self._programs = Programs(declared, load_programs(plan, declared))
        start = time.perf_counter()
        self._weights = jax.tree.leaves(
            load_weights(
                plan.model_dir,
                abstract,
                mesh=plan.mesh,
                load_format=plan.load_format,
                seed=plan.seed,
            )
        )
        logger.info(
            "weights loaded in %.1f s: %s on this process's devices; peak host memory %s",
            time.perf_counter() - start,
            format_bytes(plan.weights_bytes * len(plan.mesh.local_devices)),
            format_bytes(peak_host_bytes()),
        )
        if plan.compile_at_start:
            logger.info("compiled %s", self._programs.compile_all())
        self._state: DeviceState | None = self._programs[MAKE_STATE]()
        self._compiles_at_start = compilation_counter.compiles
        self.num_token_rows = 0
        self.pack_s = 0.0

    @property
    def num_compiles_after_warmup(self) -> int:
        return compilation_counter.compiles - self._compiles_at_start

    def execute(self, schedule: Schedule) -> PendingStep:
        """Dispatch one step and return without waiting for it."""
        start = time.perf_counter()
        if self._state is None:
            self._state = self._programs[MAKE_STATE]()
        for admission in schedule.admissions:
            self._packer.admit(admission)
            row = slot_row(admission, self._plan.num_logits)
            if row is not None:
                self._state = self._programs[WRITE_SLOT](self._state, np.int32(admission.slot), row)
        packed = self._packer.pack(schedule)
        self._write_block_tables(packed.more_block_updates)
        self.pack_s += time.perf_counter() - start
        self.num_token_rows += packed.bucket.num_tokens
        program = self._programs[packed.bucket]
        self._state, outputs = program(self._weights, self._state, packed.buffer)
        return PendingStep(schedule, outputs)

    def reset(self) -> None:
        """Start over with an empty cache, after a step has failed and its state is lost."""
        self._state = None  # made anew by the next step: there may be no room for two caches

    def free(self) -> None:
        """Give the devices' memory back; nothing can run any more."""
        self._weights, self._state = [], None

    def _write_block_tables(self, updates: np.ndarray) -> None:
        for first in range(0, len(updates), TABLE_WRITES):
            chunk = updates[first : first + TABLE_WRITES]
            padded = np.full((TABLE_WRITES, 3), self._plan.max_num_seqs, np.int32)
            padded[: len(chunk)] = chunk
            self._state = self._programs[WRITE_TABLES](self._state, padded)


def _columns(logprobs: Any) -> tuple[jax.Array, jax.Array, jax.Array] | None:
    return logprobs and (logprobs.token_ids, logprobs.logprobs, logprobs.ranks)
