"""The programs that a plan needs: what to compile, with which shapes, for which device.

The runner compiles and runs them. A planner without weights or device compiles the same programs
for a device that exists only as a description.
"""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxllm_kernels.common import cdiv

from jaxllm.lora.device import AdapterArrays, write_adapter
from jaxllm.media.device import EncoderLayout
from jaxllm.offload.buffers import (
    blocks_per_call,
    cache_shapes,
    group_buffers,
    make_gather,
    make_scatter,
    num_groups,
)
from jaxllm.parallel.sharding import place, sharding
from jaxllm.plan.buckets import Bucket
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.plan.stages import StagePlan
from jaxllm.programs import writes
from jaxllm.programs.compile import Program
from jaxllm.programs.drafting import declare_drafting, num_drafting
from jaxllm.runner.encode import make_encode
from jaxllm.runner.features import device_features
from jaxllm.runner.inputs import InputLayout
from jaxllm.runner.late import LateKey, Left, Tables, Unsampled, late_keys, make_sample_late
from jaxllm.runner.outputs import DraftedOutputs, StageOutputs, StepOutputs
from jaxllm.runner.packer import StepPacker
from jaxllm.runner.state import DeviceState, abstract_tokens
from jaxllm.runner.step import ModelSpec, make_step
from jaxllm.runner.verified_states import Kept
from jaxllm.sampling.logprobs import no_logprobs
from jaxllm.sampling.slot_state import WORD_BITS, SlotRow
from jaxllm.weights.loader import abstract_weights

# Keys of the small programs beside the steps, whose keys are their buckets.
MAKE_STATE = "make_state"
WRITE_TABLES = "write_block_tables"
WRITE_SLOT = "write_slot"
MAKE_ADAPTERS = "make_adapters"
WRITE_ADAPTER = "write_adapter"
WRITE_EMBEDS = "write_embeds"


class BlocksKey(NamedTuple):
    """The key of a program that moves blocks of a cache group, or snapshots behind them."""

    way: Literal["read", "write"]  # on the devices
    group: int

    def __str__(self) -> str:
        return f"{self.way}_blocks {self.group}"


class EncodeKey(NamedTuple):
    """The key of the program in which the tower computes so many patches."""

    num_patches: int

    def __str__(self) -> str:
        return f"encode {self.num_patches}"


# Of what layers with states keep of drafts, [drafts, N, ...].
_KEPT_AXES = (None, "heads")
TABLE_WRITES = 1024  # block updates per call of WRITE_TABLES


def make_packer(plan: EnginePlan) -> StepPacker:
    """Make the packer that turns Schedules into the inputs of steps."""
    return StepPacker(
        plan.buckets,
        num_slots=plan.max_num_seqs,
        num_cache_groups=len(plan.cache_groups),
        processors=plan.logits_processors,
        features=device_features(plan),
        late_keys=late_keys(plan),
        num_mask_words=cdiv(plan.num_logits, WORD_BITS),
        speculates=plan.speculation is not None,
        reads_ahead=plan.draft_head is not None,
        read_sizes=plan.draft_model.read_sizes if plan.draft_model is not None else (),
        num_read_rows=plan.speculation.max_rows if plan.speculation is not None else 0,
        num_ahead_rows=plan.num_ahead_rows,
        max_adapters=0 if plan.adapters is None else plan.adapters.max_loras,
        has_snapshots=plan.snapshots is not None,
    )


def encoder_layouts(plan: EnginePlan) -> list[EncoderLayout]:
    """The inputs of the programs of the tower, the smallest first."""
    images = plan.images
    if images is None:
        return []
    return [EncoderLayout(size, images.spec, plan.num_given_rows) for size in images.sizes]


class StageKey(NamedTuple):
    """The key of a program in a pipeline: the stage, and the key within the stage."""

    stage: int
    key: Hashable

    def __str__(self) -> str:
        return f"stage {self.stage}, {self.key}"


def program_key(stage: StagePlan, key: Hashable) -> Hashable:
    """The key of a stage's program among all programs of the engine."""
    return key if stage.part.is_whole else StageKey(stage.index, key)


def stage_of(plan: EnginePlan, key: Hashable) -> StagePlan:
    """The stage that runs the program with this key."""
    return plan.stages[key.stage if isinstance(key, StageKey) else 0]


def num_programs(plan: EnginePlan) -> int:
    """How many programs are declared: for each stage, its steps and its small programs."""
    late = late_keys(plan)
    small = 2 + 2 * (plan.adapters is not None) + len(encoder_layouts(plan))
    small += plan.embeds is not None
    moving = 2 * sum(
        bool(group_buffers(plan, stage, group))
        for stage in plan.stages
        for group in range(num_groups(plan))
        if plan.offload is not None
    )
    return (
        num_drafting(plan)
        + moving
        + sum(
            len(plan.buckets)
            + small
            + (1 + len(late)) * (stage.part.has_head and plan.pooling is None)
            for stage in plan.stages
        )
    )


def declare_programs(
    plan: EnginePlan, layouts: Mapping[Bucket, InputLayout]
) -> dict[Hashable, Program]:
    """Declare all programs of an engine. A step's key is its bucket, in a pipeline a StageKey."""
    return {
        program_key(stage, key): program
        for stage in plan.stages
        for key, program in declare_stage_programs(plan, stage, layouts).items()
    }


def declare_stage_programs(
    plan: EnginePlan, stage: StagePlan, layouts: Mapping[Bucket, InputLayout]
) -> dict[Hashable, Program]:
    """Declare the programs of one stage, by their keys within the stage."""
    model = plan.abstract_model(stage)
    spec = ModelSpec.of(model)
    weights, state = abstract_weights(model, stage.mesh), DeviceState.abstract(plan, stage)
    draft = None
    if plan.draft is not None:
        drafting = plan.abstract_draft()
        draft = ModelSpec.of(drafting)
        weights += abstract_weights(drafting, stage.mesh)
    everywhere = sharding(stage.mesh)
    kept = jax.tree.map(lambda leaf: leaf.sharding, state)
    left = _outputs_shardings(plan, stage)
    adapters = None if plan.adapters is None else plan.adapter_arrays(stage)

    def program(name: str, function: Callable[..., Any], *arguments: Any, **how: Any) -> Program:
        return Program(
            name=name if stage.part.is_whole else f"stage{stage.index}_{name}",
            function=function,
            arguments=arguments,
            platform=plan.chip.platform,
            **{"compiler_options": plan.compiler_options, **how},
        )

    def make_state() -> DeviceState:
        return DeviceState.zeros(plan, stage)

    # The largest first: it takes longest to compile.
    programs: dict[Hashable, Program] = {
        bucket: program(
            f"step_{bucket}".replace(" ", "_"),
            make_step(plan, stage, spec, layout, draft),
            weights,
            state,
            place(layout.abstract(), everywhere),
            *_arguments(_arriving(plan, stage, bucket), bucket, adapters),
            compiler_options=plan.step_options(bucket.num_tokens),
            donate=(1,),
            out_shardings=(kept, left),
        )
        for bucket, layout in reversed(list(layouts.items()))
    }
    if adapters is not None:
        slots = adapters.abstract()
        their = jax.tree.map(lambda leaf: leaf.sharding, slots)
        zeros = functools.partial(_zeros, slots)
        programs[MAKE_ADAPTERS] = program(MAKE_ADAPTERS, zeros, donate=(), out_shardings=their)
        programs[WRITE_ADAPTER] = program(
            WRITE_ADAPTER,
            write_adapter,
            slots,
            place(jax.ShapeDtypeStruct((), np.int32), everywhere),
            adapters.abstract_one(),
            donate=(0,),
            out_shardings=their,
        )
    for group in range(num_groups(plan) if plan.offload is not None else 0):
        if not (buffers := group_buffers(plan, stage, group)):
            continue
        caches = cache_shapes(plan, stage, group)
        size = (blocks_per_call(plan, group),)
        blocks = place(jax.ShapeDtypeStruct(size, np.int32), everywhere)
        data = tuple(buffer.shape for buffer in buffers)
        programs[BlocksKey("read", group)] = program(
            f"read_blocks_{group}",
            make_gather(buffers),
            caches,
            blocks,
            donate=(),
            out_shardings=tuple(its.sharding for its in data),
        )
        programs[BlocksKey("write", group)] = program(
            f"write_blocks_{group}",
            make_scatter(buffers),
            caches,
            blocks,
            data,
            donate=(0,),
            out_shardings=tuple(its.sharding for its in caches),
        )
    programs[MAKE_STATE] = program(MAKE_STATE, make_state, donate=(), out_shardings=kept)
    updates = jax.ShapeDtypeStruct((TABLE_WRITES, 3), np.int32)
    programs[WRITE_TABLES] = program(
        WRITE_TABLES,
        writes.write_tables,
        state,
        place(updates, everywhere),
        donate=(0,),
        out_shardings=kept,
    )
    if stage.part.has_head and plan.pooling is None:
        programs[WRITE_SLOT] = program(
            WRITE_SLOT,
            writes.write_slot,
            state,
            place(jax.ShapeDtypeStruct((), np.int32), everywhere),
            place(SlotRow.abstract(plan.num_logits, plan.max_model_len), everywhere),
            donate=(0,),
            out_shardings=kept,
        )
        for key, late in make_packer(plan).late_layouts.items():
            programs[key] = program(
                str(key).replace(" ", "_"),
                make_sample_late(plan, late),
                Tables.of(plan, state, key),
                *_left_by_steps(plan, stage, key, stage.between.kept if key.num_drafts else ()),
                place(late.abstract(), everywhere),
                donate=(0,),
                out_shardings=(Tables.of(plan, kept, key), everywhere),
            )
    if plan.images is not None:
        for layout in reversed(encoder_layouts(plan)):
            numbers, pixels = layout.abstract()
            programs[EncodeKey(layout.num_patches)] = program(
                f"encode_{layout.num_patches}",
                make_encode(plan, stage, spec.merge, layout),
                weights,
                state,
                place(numbers, everywhere),
                place(pixels, everywhere),
                donate=(1,),
                out_shardings=kept,
            )
    if plan.embeds is not None:
        size = (plan.embeds.rows_per_write, plan.architecture.hidden_size)
        programs[WRITE_EMBEDS] = program(
            WRITE_EMBEDS,
            writes.write_embeds,
            state,
            place(jax.ShapeDtypeStruct((), np.int32), everywhere),
            place(jax.ShapeDtypeStruct(size, plan.dtype), everywhere),
            donate=(0,),
            out_shardings=kept,
        )
    if plan.speculation is not None:
        programs |= declare_drafting(plan, make_packer(plan), program, weights, state, spec, draft)
    return programs


def _left_by_steps(
    plan: EnginePlan, stage: StagePlan, key: LateKey, kept_of_drafts: Kept
) -> tuple[Left, Unsampled]:
    """What a step leaves for the sampling of its late rows, and the outputs to complete."""
    num_rows = key.num_rows
    logprobs, more_logprobs = (
        jax.eval_shape(lambda n=n: no_logprobs(n, plan.step_logprobs))
        for n in (num_rows, num_rows * key.num_drafts)
    )
    tokens: Any = jax.ShapeDtypeStruct((num_rows,), np.int32)
    drafted = None
    if plan.verifies_late:
        figures: Any = jax.ShapeDtypeStruct((num_rows, 2 + key.num_drafts), np.int32)
        drafted = DraftedOutputs(
            figures=figures, logprobs=more_logprobs if key.num_drafts else None
        )
    logits = jax.ShapeDtypeStruct((key.num_places, plan.num_logits), np.float32)
    left = place(Left(tokens, logprobs, drafted), sharding(stage.mesh))
    return left, Unsampled(place(logits, plan.logits_sharding(stage)), kept_of_drafts)


def _outputs_shardings(plan: EnginePlan, stage: StagePlan) -> StepOutputs | StageOutputs:
    everywhere: Any = sharding(stage.mesh)
    expert_tokens = (everywhere,) if plan.counts_experts else ()
    if not stage.part.has_head:
        return StageOutputs(hidden=everywhere, expert_tokens=expert_tokens)
    logits: Any = plan.logits_sharding(stage) if plan.leaves_logits else None
    kept: Any = sharding(stage.mesh, _KEPT_AXES) if plan.verifies_states_late else ()
    drafted: Any = everywhere if plan.speculation is not None else None
    logprobs: Any = everywhere if plan.pooling is None else None
    return StepOutputs(
        tokens=everywhere,
        logprobs=logprobs,
        slices=everywhere,
        logits=logits,
        drafted=drafted,
        expert_tokens=expert_tokens,
        kept=kept,
    )


def _arriving(
    plan: EnginePlan, stage: StagePlan, bucket: Bucket
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The array that arrives at a stage from the stage before; at the first, from the last."""
    if stage.part.is_whole:
        return ()
    if stage.part.embeds:
        return (abstract_tokens(plan, stage),)
    hidden = (bucket.num_tokens, plan.architecture.hidden_size)
    return (place(jax.ShapeDtypeStruct(hidden, plan.dtype), sharding(stage.mesh)),)


def _arguments(
    arriving: tuple[Any, ...], bucket: Bucket, adapters: AdapterArrays | None
) -> tuple[Any, ...]:
    """The last arguments of a step."""
    if not bucket.has_adapters:
        return arriving
    assert adapters is not None
    return (*(arriving or (None,)), adapters.abstract())


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), shapes)
