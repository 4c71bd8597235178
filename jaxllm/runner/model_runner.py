"""Runs Schedules: pack, run, carry, unpack. Loads the model and compiles its programs.

The device runs steps in the order of their dispatch. `execute` returns as soon as a step is
dispatched, so the host plans the next step while this one runs, and reads the tokens one step
later. The model's stage, or each stage of a pipeline, owns its weights and its device state.
"""

import dataclasses
import math
import time
from typing import Any

import jax
import numpy as np

from jaxllm.handover.ends import Ends
from jaxllm.handover.source import HandOver
from jaxllm.heap import trim_heap
from jaxllm.logging import init_logger
from jaxllm.lora.shelf import HostShelf
from jaxllm.media.device import in_runs
from jaxllm.metrics.memory import DeviceMemory
from jaxllm.metrics.startup import Phases
from jaxllm.offload.identity import open_files
from jaxllm.offload.mover import BlockMover
from jaxllm.plan.buckets import Bucket
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.plan.memory import device_memory, format_bytes, peak_host_bytes
from jaxllm.programs.bundle import load_programs
from jaxllm.programs.compile import Programs, compilation_counter
from jaxllm.programs.declare import declare_programs, encoder_layouts, make_packer
from jaxllm.programs.store import ProgramStore
from jaxllm.prompt_embeds.device import in_writes
from jaxllm.prompt_embeds.slice import NAME as EMBEDS
from jaxllm.runner.host_arrays import HostArray
from jaxllm.runner.huge_pages import use_huge_pages
from jaxllm.runner.kv_scales import with_calculated_scales
from jaxllm.runner.late import Left, Unsampled, late_key
from jaxllm.runner.outputs import StepOutputs
from jaxllm.runner.pipeline import Pipeline
from jaxllm.runner.stage import Stage
from jaxllm.sampling.slot_state import slot_row
from jaxllm.scheduler.schedule import (
    Admission,
    DraftedResult,
    LateMasks,
    LogprobArrays,
    Schedule,
    StepResult,
)
from jaxllm.weights import converted
from jaxllm.weights.loader import load_parts

logger = init_logger(__name__)


class PendingStep:
    """A dispatched step whose outputs are on their way to the host."""

    def __init__(
        self,
        schedule: Schedule,
        bucket: Bucket,
        outputs: StepOutputs,
        drafts: jax.Array | None = None,
    ):
        self._wants_logprobs = schedule.wants_logprobs
        self._wants_logits = schedule.wants_logits
        self._has_drafts = schedule.num_drafts is not None
        self._features = [name for name, its in schedule.slices.items() if its]
        self.schedule = schedule
        self.bucket = bucket
        self.outputs = outputs
        self.drafts = drafts  # of late rows, i32 [M, k]; None: nothing has gone ahead for them
        if drafts is not None:
            drafts.copy_to_host_async()
        if schedule.late_rows is None:
            self.send(outputs)

    def send(self, outputs: StepOutputs) -> None:
        """Send the complete outputs of the step to the host. What nobody wants is freed."""
        outputs = dataclasses.replace(outputs, kept=())
        if not self._wants_logits:
            outputs = dataclasses.replace(outputs, logits=None)
        self.outputs = outputs
        for array in jax.tree.leaves(self._wanted()):
            array.copy_to_host_async()

    def is_ready(self) -> bool:
        tokens: Any = self.outputs.tokens  # the type jax.Array lacks is_ready
        return tokens.is_ready()

    def result(self) -> StepResult:
        """Wait for the device and return numpy arrays."""
        wanted = jax.tree.map(np.asarray, self._wanted())
        tokens, logprobs, logits, slices, drafted, expert_tokens = wanted
        return StepResult(
            token_ids=tokens,
            logprobs=LogprobArrays(*logprobs) if logprobs else None,
            logits=logits,
            slices=slices,
            drafted=_drafted(*drafted) if drafted else None,
            # The layers of other stages have zeros.
            expert_tokens=np.sum(expert_tokens, axis=0) if expert_tokens else None,
        )

    def _wanted(self) -> tuple[Any, Any, Any, Any, Any, Any]:
        """The outputs to copy to the host. The others stay on the device, and are freed with the
        step."""
        outputs = self.outputs
        return (
            outputs.tokens,
            outputs.logprobs if self._wants_logprobs else None,
            outputs.logits if self._wants_logits else None,
            {name: outputs.slices[name] for name in self._features},
            outputs.drafted
            and (
                outputs.drafted.figures,
                outputs.drafted.logprobs if self._wants_logprobs and self._has_drafts else None,
                outputs.drafted.proposals,
            ),
            outputs.expert_tokens,
        )


def _drafted(figures: np.ndarray, logprobs: Any, proposals: np.ndarray | None) -> DraftedResult:
    """Read DraftedOutputs."""
    return DraftedResult(
        num_proposed=figures[:, 0],
        num_accepted=figures[:, 1],
        token_ids=figures[:, 2:],
        logprobs=LogprobArrays(*logprobs) if logprobs else None,
        proposals=proposals,
    )


class ModelRunner:
    """One model on its devices."""

    def __init__(self, plan: EnginePlan, replica: int = 0):
        self._plan = plan
        self._packer = make_packer(plan)
        self._encoders = {its.num_patches: its for its in encoder_layouts(plan)}
        declared = declare_programs(plan, self._packer.layouts)
        programs = Programs(declared, load_programs(plan, declared), ProgramStore.of(plan))
        self._programs = programs
        self.startup = Phases()
        with self.startup.timed("Load weights"):
            weights = self._load_weights()
        if plan.compiles == "ahead":
            with self.startup.timed("Compile graphs"):
                logger.info("compiled %s", programs.compile_all())
        with self.startup.timed("Allocate KV cache"):
            self._stages = [
                Stage(plan, stage, programs, its)
                for stage, its in zip(plan.stages, weights, strict=True)
            ]
        self._model = self._stages[0] if len(self._stages) == 1 else Pipeline(plan, self._stages)
        self._mover: BlockMover | None = None
        self._ends = Ends(plan, replica)
        if plan.offload is not None:
            self._mover = BlockMover(plan, self._stages, open_files(plan), self._ends.taker)
            try:
                self._ends.open_door(self._mover.look_up)
            except BaseException:
                self._mover.close()
                raise
        self._host_weights: list[list[HostArray]] = []  # by stage, while the engine sleeps
        self._shelf: HostShelf | None = None
        if plan.adapters is not None:
            self._adapter_arrays = [plan.adapter_arrays(stage) for stage in plan.stages]
            self._shelf = HostShelf(
                plan.adapters.limits(plan.dtype),
                lambda adapter: [its.lay_out(adapter) for its in self._adapter_arrays],
            )
        self._newest: PendingStep | None = None
        self.num_compiles_after_warmup = 0
        self.num_token_rows = 0
        self.pack_s = 0.0
        if plan.compiles == "behind":  # last, so that no thread outlives a start that fails
            programs.compile_behind()

    def device_memory(self) -> list[DeviceMemory]:
        """The memory of the devices of this process that report it."""
        return device_memory(
            device for stage in self._plan.stages for device in stage.mesh.local_devices
        )

    def execute(self, schedule: Schedule) -> PendingStep:
        """Dispatch one step and return without waiting for it."""
        compiles = compilation_counter.compiles_here
        start = time.perf_counter()
        if schedule.moves is not None:
            self.mover().send(schedule.moves)
        for admission in schedule.admissions:
            self._packer.admit(admission)
            row = slot_row(admission, self._plan.num_logits, self._plan.max_model_len)
            if row is not None:
                self._model.write_slot(admission.slot, row)
            if self._plan.speculation is not None and self._plan.speculation.proposes:
                self._admit_drafts(admission)
        if schedule.draft_reads is not None:
            self._stages[0].read_draft(*self._packer.pack_reads(schedule.draft_reads))
        for write in schedule.adapter_writes:
            laid_out = self.shelf().arrays(write.content)
            for stage, its, one in zip(self._stages, self._adapter_arrays, laid_out, strict=True):
                stage.write_adapter(write.slot, its.placed(one))
        for run in in_runs(schedule.encodings, list(self._encoders)):
            num_patches = sum(one.rows * one.columns for one in run)
            size = next(size for size in self._encoders if size >= num_patches)
            self._stages[0].encode(size, *self._encoders[size].pack(run))
        if (embeds := schedule.slices.get(EMBEDS)) is not None:
            assert (its := self._plan.embeds) is not None
            writes = in_writes(
                embeds["data"], self._plan.dtype, its.spec.first_row, its.rows_per_write
            )
            for row, embeddings in writes:
                self._stages[0].write_embeds(row, embeddings)
        packed = self._packer.pack(schedule)
        self._model.write_block_tables(packed.more_block_updates)
        drafts = None
        if (ahead := self._packer.pack_ahead(schedule)) is not None:
            self._model.write_block_tables(ahead.more_block_updates)
            drafts = self._stages[0].draft_ahead(ahead.buffer)
        self.pack_s += time.perf_counter() - start
        self.num_token_rows += packed.bucket.num_tokens
        outputs = self._model.run(packed)
        # Other threads compile for other replicas, or behind the steps.
        self.num_compiles_after_warmup += compilation_counter.compiles_here - compiles
        assert isinstance(outputs, StepOutputs)
        self._newest = PendingStep(schedule, packed.bucket, outputs, drafts)
        return self._newest

    def late_drafts(self) -> np.ndarray | None:
        """As in `Executor`."""
        assert self._newest is not None, "no step was executed"
        if self._newest.drafts is None:
            return None
        drafts = np.asarray(self._newest.drafts)
        self._newest.drafts = None  # it is complete
        return drafts

    def sample(self, masks: LateMasks) -> None:
        """Sample the late rows of the newest step, and return without waiting for it."""
        step = self._newest
        assert step is not None, "no step was executed"
        compiles = compilation_counter.compiles_here
        outputs = step.outputs
        assert outputs.logprobs is not None, "the engine pools"
        assert outputs.logits is not None, "the plan has no late rows"
        drafted = outputs.drafted if self._plan.verifies_late else None
        left = Left(outputs.tokens, outputs.logprobs, drafted)
        key = late_key(self._plan, step.bucket)
        packed = self._packer.pack_late(step.schedule, key, masks)
        # In a program for decodes no row has drafts.
        kept = outputs.kept if key.num_drafts else ()
        left = self._model.sample_late(key, left, Unsampled(outputs.logits, kept), packed)
        self.num_compiles_after_warmup += compilation_counter.compiles_here - compiles
        step.send(
            dataclasses.replace(
                outputs,
                tokens=left.tokens,
                logprobs=left.logprobs,
                drafted=left.drafted or outputs.drafted,
            )
        )

    def _admit_drafts(self, admission: Admission) -> None:
        known = admission.prompt_token_ids + admission.output_token_ids
        tokens = np.zeros(self._plan.max_model_len, np.int32)
        tokens[: len(known)] = known
        self._stages[0].admit_drafts(admission.slot, tokens)  # there is one: see EngineConfig

    def shelf(self) -> HostShelf:
        """What fetches adapters."""
        assert self._shelf is not None, "the plan has no adapters"
        return self._shelf

    def mover(self) -> BlockMover:
        """What moves blocks to the host and back."""
        assert self._mover is not None, "the plan has no places on the host"
        return self._mover

    def hand_over(self) -> HandOver | None:
        """What the engine does of handing prompts over."""
        return self._ends.info()

    def begin_to_end(self) -> None:
        """Hand nothing over any more, begin with no more programs, and let the thread that moves
        blocks write its files, without waiting for that. Nothing can run any more."""
        self._ends.close()
        self._programs.begin_to_stop()
        if self._mover is not None:
            self._mover.begin_to_close()

    def end_threads(self) -> None:
        """Wait until files of blocks that had none are written, or a while. Read no more adapters,
        and compile nothing more."""
        self.begin_to_end()
        if self._mover is not None:
            self._mover.close()
        if self._shelf is not None:
            self._shelf.close()
        self._programs.stop()

    def reset(self) -> None:
        """Start over with an empty cache, after a step has failed and its state is lost."""
        self._newest = None
        self._model.reset()

    def sleep(self, *, keep_weights: bool) -> None:
        """Free the weights and the state on the devices, but not the programs. No step may be in
        flight. The weights are kept in the host's memory, or dropped."""
        self._model.reset()
        if not keep_weights:
            self._host_weights = []
        elif self._has_weights:
            # Copy all before freeing any: if the host's memory does not suffice, nothing is lost.
            self._host_weights = [list(map(HostArray, stage.weights)) for stage in self._stages]
        for stage in self._stages:
            stage.weights = []

    def wake_weights(self) -> None:
        """Copy the weights back to the devices, or load the checkpoint again."""
        if self._has_weights:
            return
        if self._host_weights:
            weights = self._placed([[a.to_device() for a in its] for its in self._host_weights])
        else:
            weights = self._load_weights()
        for stage, its in zip(self._stages, weights, strict=True):
            stage.weights = its
        self._host_weights = []

    def wake_cache(self) -> None:
        """Make an empty KV cache now."""
        for stage in self._stages:
            stage.ensure_state()

    def free(self) -> None:
        """Free the devices' memory. Nothing can run any more."""
        self.end_threads()
        self._host_weights, self._newest = [], None
        self._model.free()

    @property
    def _has_weights(self) -> bool:
        return bool(self._stages[0].weights)

    def _load_weights(self) -> list[list[jax.Array]]:
        """Load the weights of each stage."""
        plan, start = self._plan, time.perf_counter()
        parts = [(plan.abstract_model(stage), stage.mesh) for stage in plan.stages]
        if plan.load_format == "orbax":
            states, of_draft = converted.load(plan.model_dir, parts), "auto"
        else:
            of_draft = plan.load_format
            states = load_parts(plan.model_dir, parts, load_format=of_draft, seed=plan.seed)
        if plan.draft is not None:
            states += load_parts(
                plan.draft.model_dir,
                [(plan.abstract_draft(), plan.stages[0].mesh)],
                load_format=of_draft,
                seed=plan.seed,
            )
        logger.info(
            "weights loaded in %.1f s: %s on this process's devices; peak host memory %s",
            time.perf_counter() - start,
            format_bytes(_local_bytes(states)),
            format_bytes(peak_host_bytes()),
        )
        states = with_calculated_scales(plan, states)
        trim_heap()  # the buffers between files and devices
        weights = list(map(jax.tree.leaves, states))
        if plan.draft is not None:
            weights = [weights[0] + weights[1]]  # the order in which a step takes them
        return self._placed(weights)

    def _placed(self, weights: list[list[jax.Array]]) -> list[list[jax.Array]]:
        if self._plan.chip.platform == "cpu":
            for its in weights:
                use_huge_pages(its)
        return weights


def _local_bytes(arrays: Any) -> int:
    """How many bytes arrays take on the devices of this process."""
    return sum(
        math.prod(array.sharding.shard_shape(array.shape))
        * array.dtype.itemsize
        * len(array.sharding.addressable_devices)
        for array in jax.tree.leaves(arrays)
    )
