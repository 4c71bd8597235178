"""Reports what a plan costs on a device, by compiling it: memory, programs, and bounds on time
(see `roofline`)."""

import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import jax
from jaxllm_kernels.common import round_up
from jaxllm_kernels.platform import TABLE_ROW_MULTIPLES

from jaxllm.cache_groups import CacheGroup, StateSnapshots, room_for
from jaxllm.layers.attention import AttentionSpec
from jaxllm.layers.latent_attention import LatentAttentionSpec
from jaxllm.models.describe import describe_layers
from jaxllm.parallel.sharding import TENSOR
from jaxllm.plan.buckets import Bucket
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.plan.stages import StagePlan, expert_weights
from jaxllm.programs.compile import Program
from jaxllm.programs.declare import (
    declare_stage_programs,
    make_packer,
    num_programs,
    program_key,
)
from jaxllm.programs.hlo import collectives, whole_array_copies
from jaxllm.programs.needs import needed_bytes
from jaxllm.programs.offload import OffloadReport, report_offload
from jaxllm.programs.progress import CompileProgress
from jaxllm.programs.roofline import Bound, ExpertLayers, Roofline, Window


@dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """One compiled program, per device."""

    name: str
    num_decodes: int  # rows of a decode step; 0 for other programs
    compile_seconds: float
    temp_bytes: int
    code_bytes: int
    # Opcode -> how many there are, and their total bytes.
    collectives: dict[str, tuple[int, int]]
    # Copies of arrays as large as a weight or a layer's cache; there should be none.
    whole_array_copies: list[str]
    bound: Bound | None  # of a full step; None for the small programs beside the steps


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """What a stage takes on each of its devices; without a pipeline, what the model takes."""

    num_layers: int
    num_devices: int
    weights_bytes: int
    kv_cache_bytes: int
    # Of the tables and what steps leave (`plan.between_steps`), states of recurrent layers with
    # their snapshots, and the slots of adapters.
    state_bytes: int
    # Of all programs, as seen from the largest (`programs.needs`).
    program_bytes: int
    roofline: Roofline | None  # None where the chip's rates are not known
    # What of the weights and of the cache are the draft model's.
    draft_weights_bytes: int = 0
    draft_cache_bytes: int = 0
    recurrent_bytes: int = 0  # of `state_bytes`, those of the states of recurrent layers
    snapshots_bytes: int = 0  # of `state_bytes`, those of snapshots of such states
    adapters_bytes: int = 0  # of `state_bytes`, those of the slots of adapters

    @property
    def used_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.state_bytes + self.program_bytes


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan on its chips. Bytes are those of one device of the stage that takes the most."""

    model: str
    chip: str
    num_devices: int
    num_chips: int
    dtype: str
    attention_backend: str
    kv_cache: str | None  # the codes of cached keys and values; None: they have the model's type
    experts: str | None  # None: the model has none, or they are codes
    coded_products: tuple[str, ...]  # how products with codes are computed, in words
    layers: list[str]  # a line for each distinct one
    hbm_bytes: int
    weights_bytes: int
    kv_cache_bytes: int
    state_bytes: int
    program_bytes: int
    stages: list[StageReport]
    block_size: int
    cache_groups: tuple[CacheGroup, ...]
    keeps_states: bool
    snapshots: StateSnapshots | None
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    buckets: tuple[Bucket, ...]
    offload: OffloadReport | None  # None: evicted blocks are gone
    context: int  # the bounds assume so many tokens in every row
    # An upper bound of output tokens per second, with as many rows as fit in the cache, spread
    # evenly over one step in each stage; and the least time of the slowest stage, which sets the
    # pace. None if the chip's rates are not known.
    max_tokens_per_second: float | None
    pace: Bound | None
    programs: list[ProgramReport]

    @property
    def num_tokens(self) -> int:
        """How many tokens fit in the cache of the layers that keep the most tokens."""
        return self.cache_groups[0].num_blocks * self.block_size

    @property
    def free_bytes(self) -> int:
        """The rest of the device's memory; negative if the plan does not fit."""
        return self.hbm_bytes - (
            self.weights_bytes + self.kv_cache_bytes + self.state_bytes + self.program_bytes
        )

    @property
    def largest_decode(self) -> ProgramReport:
        """The decode step with the most rows; in a pipeline, of the slowest stage."""
        decodes = (program for program in self.programs if program.num_decodes)
        return max(decodes, key=lambda p: (p.num_decodes, p.bound.seconds if p.bound else 0))

    @property
    def num_fitting(self) -> int:
        """How many rows of the report's context the cache has room for."""
        return self.room_for(self.context)

    def room_for(self, context: int) -> int:
        """How many requests with contexts of `context` tokens the cache has room for."""
        return room_for(self.cache_groups, context, self.block_size)


def report_plan(
    plan: EnginePlan,
    *,
    context: int,
    all_programs: bool = True,
    on_compiled: Callable[[Hashable, jax.stages.Compiled], None] = lambda key, compiled: None,
) -> PlanReport:
    """Compile the programs of a plan, or the largest step of each kind, for every stage. Call
    `on_compiled` with each. In the bounds each row has `context` tokens."""
    layouts = make_packer(plan).layouts
    wanted = None if all_programs else _largest_buckets(plan)
    total = num_programs(plan) if wanted is None else len(wanted) * len(plan.stages)
    stages, programs = [], []
    with CompileProgress(total) as progress:
        for stage in plan.stages:
            declared = declare_stage_programs(plan, stage, layouts)
            weights, state, *_ = declared[plan.buckets[-1]].arguments
            of_drafter = getattr(state.drafter, "caches", ())
            arrays = jax.tree.leaves(
                (weights, state.caches, state.snapshots, of_drafter, state.given)
            )
            compiled = []
            for key in declared if wanted is None else wanted:
                program, name = declared[key], program_key(stage, key)
                with progress.compiling(name):
                    start = time.perf_counter()
                    executable = program.compile(program.lower())
                    seconds = time.perf_counter() - start
                on_compiled(name, executable)
                compiled.append(
                    _report_program(plan, stage, key, executable, seconds, arrays, context)
                )
            programs += compiled
            stages.append(_report_stage(plan, stage, compiled, declared))
    fullest = max(stages, key=lambda stage: stage.used_bytes)
    num_rows = min(plan.max_num_seqs, plan.room_for(context))
    rows_of_step = num_rows / min(len(plan.stages), max(num_rows, 1))
    bounds = [step_bound(plan, s, rows_of_step, rows_of_step, context) for s in plan.stages]
    pace = max((bound for bound in bounds if bound), key=lambda b: b.seconds, default=None)
    return PlanReport(
        model=plan.model_name,
        chip=plan.chip.name,
        num_devices=plan.num_devices,
        num_chips=-(-plan.num_devices // plan.chip.devices_per_chip),
        dtype=str(plan.dtype),
        attention_backend=plan.attention.name,
        kv_cache=None if plan.kv_cache is None else str(plan.kv_cache),
        experts=None if plan.experts is None else plan.experts.name,
        coded_products=plan.coded_products,
        layers=describe_layers(plan.architecture),
        hbm_bytes=plan.chip.hbm_bytes,
        weights_bytes=fullest.weights_bytes,
        kv_cache_bytes=fullest.kv_cache_bytes,
        state_bytes=fullest.state_bytes,
        program_bytes=fullest.program_bytes,
        stages=stages,
        block_size=plan.block_size,
        cache_groups=plan.cache_groups,
        keeps_states=plan.state_ops is not None,
        snapshots=plan.snapshots,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        buckets=plan.buckets,
        offload=report_offload(
            plan,
            [step_bound(plan, s, plan.max_num_batched_tokens, 1, context) for s in plan.stages],
        ),
        context=context,
        max_tokens_per_second=rows_of_step / pace.seconds if pace else None,
        pace=pace,
        programs=programs,
    )


def _largest_buckets(plan: EnginePlan) -> list[Bucket]:
    """The largest bucket of decode steps, if there are any, and that of mixed steps."""
    return list({bucket.decode_only: bucket for bucket in plan.buckets}.values())


def _report_program(
    plan: EnginePlan,
    stage: StagePlan,
    key: Hashable,
    compiled: jax.stages.Compiled,
    seconds: float,
    arrays: list[jax.ShapeDtypeStruct],
    context: int,
) -> ProgramReport:
    """Report a compiled program. `arrays` are the weights and caches of its stage: its other inputs
    are no larger than activations."""
    memory, hlo = compiled.memory_analysis(), compiled.as_text() or ""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for collective in collectives(hlo):
        counts[collective.opcode] += 1
        sizes[collective.opcode] += collective.num_bytes
    return ProgramReport(
        name=str(program_key(stage, key)),
        num_decodes=key.num_rows if isinstance(key, Bucket) and key.decode_only else 0,
        compile_seconds=seconds,
        temp_bytes=memory.temp_size_in_bytes if memory else 0,
        code_bytes=memory.generated_code_size_in_bytes if memory else 0,
        collectives={name: (counts[name], sizes[name]) for name in counts},
        whole_array_copies=[
            f"{copy.dtype}{list(copy.shape)}" for copy in whole_array_copies(hlo, arrays)
        ],
        bound=(
            step_bound(plan, stage, key.num_tokens, key.num_rows, context)
            if isinstance(key, Bucket)
            else None
        ),
    )


def _report_stage(
    plan: EnginePlan,
    stage: StagePlan,
    programs: list[ProgramReport],
    declared: Mapping[Hashable, Program],
) -> StageReport:
    adapters = 0 if plan.adapters is None else plan.adapters.bytes_by_stage[stage.index]
    return StageReport(
        num_layers=len(stage.part.layers),
        num_devices=stage.mesh.size,
        weights_bytes=stage.weights_bytes,
        kv_cache_bytes=stage.kv_cache_bytes,
        state_bytes=stage.between.num_bytes + stage.states_bytes + stage.snapshots_bytes + adapters,
        program_bytes=needed_bytes(
            plan,
            declared,
            temp_bytes=max(p.temp_bytes for p in programs),
            code_bytes=max(p.code_bytes for p in programs),
        ),
        roofline=roofline(plan, stage),
        draft_weights_bytes=stage.weights_bytes - stage.weights.num_bytes,
        draft_cache_bytes=0 if stage.draft is None else stage.draft.kv_cache_bytes,
        recurrent_bytes=stage.states_bytes,
        snapshots_bytes=stage.snapshots_bytes,
        adapters_bytes=adapters,
    )


def roofline(plan: EnginePlan, stage: StagePlan) -> Roofline | None:
    """The lower bounds of a stage's steps; None if the chip's rates are not known."""
    chip, arch = plan.chip, plan.architecture
    if not chip.hbm_bytes_per_second:
        return None
    part, itemsize, num_shards = stage.part, plan.dtype.itemsize, stage.mesh.shape[TENSOR]
    # A token looks up one row of the embedding. As the head it is a matrix, read for rows only.
    has_head = part.has_head and plan.num_logits > 0
    num_rows = (plan.num_logits or arch.vocab_size) / num_shards
    embedding = num_rows * round_up(arch.hidden_size, TABLE_ROW_MULTIPLES[chip.platform])
    # The devices sum the looked-up rows, and the outputs of the attention and MLP of each layer.
    # In a sum each device sends the others their parts, and then its own part of the sum.
    num_sums = part.embeds + 2 * len(part.layers)
    sent_per_byte = 2 * (num_shards - 1) / num_shards
    is_tied = arch.tie_word_embeddings
    # Only a table that looks up has padded rows.
    head = (embedding if is_tied else num_rows * arch.hidden_size) if has_head else 0
    looked_up = embedding if part.embeds and not (has_head and is_tied) else 0
    if (own := arch.per_layer_input) is not None:
        size = round_up(own.size * arch.num_layers, TABLE_ROW_MULTIPLES[chip.platform])
        looked_up += own.vocab_size * size / num_shards
    experts = tuple(ExpertLayers(size, share) for share, size in stage.weights.expert_bytes)
    of_experts = expert_weights(arch, part)
    not_chosen = sum(count * (1 - share) for share, count in of_experts.items()) / num_shards
    return Roofline(
        bytes_per_second=chip.hbm_bytes_per_second,
        flops_per_second=chip.bf16_flops_per_second,
        bytes_per_step=stage.weights.num_bytes
        - looked_up * itemsize
        - sum(its.num_bytes for its in experts),
        flops_per_token=2 * (stage.weights.num_weights - looked_up - head - not_chosen),
        flops_per_row=2 * head,
        windows=_windows(plan, stage),
        # The states of a row are read and written.
        state_bytes_per_row=2 * stage.states_bytes / plan.max_num_seqs,
        experts=experts,
        sent_bytes_per_token=num_sums * arch.hidden_size * itemsize * sent_per_byte,
        link_bytes_per_second=chip.link_bytes_per_second,
    )


def _windows(plan: EnginePlan, stage: StagePlan) -> tuple[Window, ...]:
    """What the attentions of a stage read and compute."""
    layers = {index: plan.architecture.layers[index] for index in stage.part.layers}
    owners = [
        (index, mixer)
        for index, layer in layers.items()
        if layer.caches_of is None
        for mixer in layer.mixers
        if isinstance(mixer, AttentionSpec | LatentAttentionSpec)
    ]
    caches = list(zip(owners, stage.attention_configs, stage.block_bytes, strict=True))
    # A layer that uses the caches of another one reads them again.
    again = [layer.caches_of for layer in layers.values() if layer.caches_of is not None]
    read = caches + [cache for used in again for cache in caches if cache[0][0] == used]
    windows: dict[int, Window] = {}
    for (_, mixer), config, block_bytes in read:
        # Of chunks a token sees half of one, on average.
        size = config.sliding_window or -(-(config.chunk or 0) // 2)
        window = windows.get(size, Window(size, 0, 0))
        per_pair = 2 * config.num_heads * (config.head_size + config.value_size)
        fewest, of_fresh = 0, per_pair
        if isinstance(mixer, LatentAttentionSpec) and mixer.expanded is not None:
            sizes = mixer.nope_size + mixer.rope_size + mixer.v_head_size
            fewest, of_fresh = mixer.expanded.fewest_tokens, 2 * config.num_heads * sizes
        windows[size] = Window(
            size=size,
            bytes_per_token=window.bytes_per_token + block_bytes / plan.block_size,
            flops_per_attended=window.flops_per_attended + per_pair,
            fewest_fresh=max(window.fewest_fresh, fewest),
            flops_per_fresh=window.flops_per_fresh + of_fresh,
        )
    return tuple(sorted(windows.values()))


def step_bound(
    plan: EnginePlan, stage: StagePlan, num_tokens: float, num_rows: float, context: int
) -> Bound | None:
    """The least time of a step on one stage whose rows are alike: each has an equal share of the
    tokens, at the end of `context` tokens."""
    line = roofline(plan, stage)
    if line is None:
        return None
    num_bytes, num_flops = line.attention(num_tokens / max(num_rows, 1), context)
    return line.bound(num_tokens, num_rows, (num_rows * num_bytes, num_rows * num_flops))
