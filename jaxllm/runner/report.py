"""What a plan comes to on a device, found by compiling it: memory, programs, and bounds on time.

The times are lower bounds: bytes that must be read and operations that must be done, over the
rates of the chip's data sheet. Nothing is as fast, and nothing here predicts how much slower it is.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal

import jax

from jaxllm.runner.buckets import Bucket
from jaxllm.runner.hlo import collectives, whole_array_copies
from jaxllm.runner.plan import EnginePlan
from jaxllm.runner.programs import declare_programs, make_packer
from jaxllm.runner.state import DeviceState


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The least time that a step can take."""

    seconds: float
    limited_by: Literal["memory bandwidth", "arithmetic"]


@dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """One compiled program, per device."""

    name: str
    num_decodes: int  # rows of a decode step; 0 for other programs
    compile_seconds: float
    temp_bytes: int
    code_bytes: int
    # Opcode -> how many there are and how many bytes they make in all.
    collectives: dict[str, tuple[int, int]]
    # Copies of something as large as a weight or a layer's cache; there should be none.
    whole_array_copies: list[str]
    bound: Bound | None  # of a step that is full; None for programs beside the steps


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan on its chips. Bytes are those of one device."""

    model: str
    chip: str
    num_devices: int
    num_chips: int
    dtype: str
    attention_backend: str
    hbm_bytes: int
    weights_bytes: int
    kv_cache_bytes: int
    state_bytes: int  # of the sampler, and block tables
    program_bytes: int  # the largest program's temporaries; code of all, if all were the largest
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    context: int  # tokens of every row in the bounds
    # No more output tokens per second than this, of as many rows as have room in the cache; None
    # where the chip's rates are not known.
    max_tokens_per_second: float | None
    programs: list[ProgramReport]

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def free_bytes(self) -> int:
        """What is left of the device's memory; negative where the plan does not fit."""
        return self.hbm_bytes - (
            self.weights_bytes + self.kv_cache_bytes + self.state_bytes + self.program_bytes
        )

    @property
    def largest_decode(self) -> ProgramReport:
        """The decode step with most rows."""
        decodes = (program for program in self.programs if program.num_decodes)
        return max(decodes, key=lambda program: program.num_decodes)

    @property
    def num_fitting(self) -> int:
        """Rows of the given context for which the cache has room."""
        return self.num_tokens // self.context


def report_plan(
    plan: EnginePlan,
    *,
    context: int,
    all_programs: bool = True,
    on_program: Callable[[str], None] = lambda name: None,
    on_compiled: Callable[[Hashable, jax.stages.Compiled], None] = lambda key, compiled: None,
) -> PlanReport:
    """Compile the programs of a plan, or the largest of each kind, and let the caller see each.
    Rows have `context` tokens in the bounds."""
    declared = declare_programs(plan, make_packer(plan).layouts)
    num_programs = len(declared)
    if not all_programs:
        decodes = [bucket for bucket in plan.buckets if bucket.decode_only]
        mixed = [bucket for bucket in plan.buckets if not bucket.decode_only]
        declared = {bucket: declared[bucket] for bucket in (decodes[-1], mixed[-1])}
    programs = []
    for key, program in declared.items():
        on_program(str(key))
        start = time.perf_counter()
        compiled = program.compile(program.lower())
        seconds = time.perf_counter() - start
        on_compiled(key, compiled)
        memory, hlo = compiled.memory_analysis(), compiled.as_text() or ""
        counts: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for collective in collectives(hlo):
            counts[collective.opcode] += 1
            sizes[collective.opcode] += collective.num_bytes
        arrays = [a for a in jax.tree.leaves(program.arguments) if a.dtype == plan.dtype]
        programs.append(
            ProgramReport(
                name=str(key),
                num_decodes=key.num_rows if isinstance(key, Bucket) and key.decode_only else 0,
                compile_seconds=seconds,
                temp_bytes=memory.temp_size_in_bytes if memory else 0,
                code_bytes=memory.generated_code_size_in_bytes if memory else 0,
                collectives={name: (counts[name], sizes[name]) for name in counts},
                whole_array_copies=[
                    f"{copy.dtype}{list(copy.shape)}" for copy in whole_array_copies(hlo, arrays)
                ],
                bound=(
                    step_bound(plan, key.num_tokens, key.num_rows, context)
                    if isinstance(key, Bucket)
                    else None
                ),
            )
        )
    num_decodes = min(plan.max_num_seqs, plan.num_blocks * plan.block_size // context)
    decode = step_bound(plan, num_decodes, num_decodes, context)
    state = DeviceState.abstract(plan)
    beside_caches = jax.tree.leaves((state.tokens, state.block_tables, state.slots))
    return PlanReport(
        model=plan.model_name,
        chip=plan.chip.name,
        num_devices=plan.mesh.size,
        num_chips=-(-plan.mesh.size // plan.chip.devices_per_chip),
        dtype=str(plan.dtype),
        attention_backend=plan.attention.name,
        hbm_bytes=plan.chip.hbm_bytes,
        weights_bytes=plan.weights_bytes,
        kv_cache_bytes=plan.kv_cache_bytes,
        state_bytes=sum(map(_shard_bytes, beside_caches)),
        program_bytes=max(p.temp_bytes for p in programs)
        + max(p.code_bytes for p in programs) * num_programs,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        context=context,
        max_tokens_per_second=num_decodes / decode.seconds if decode else None,
        programs=programs,
    )


def step_bound(plan: EnginePlan, num_tokens: int, num_rows: int, context: int) -> Bound | None:
    """The least time of a step: every matrix is read once, and what a row sees of its context.

    Each token is worth two operations per weight of a matrix, and four per attended token, query
    head and element of a head. A row's tokens are the last of its context.
    """
    chip, arch = plan.chip, plan.architecture
    if not chip.hbm_bytes_per_second:
        return None
    itemsize, num_shards = plan.dtype.itemsize, plan.mesh.size
    # The embedding is a table in which rows are looked up; as a head it is a matrix, for rows only.
    embedding = plan.num_logits * arch.hidden_size / num_shards
    matrices = plan.weights_bytes / itemsize - embedding * (1 if arch.tie_word_embeddings else 2)
    token_bytes = plan.kv_cache_bytes / (plan.num_blocks * plan.block_size) / arch.num_layers
    # In the mean over a row's tokens; a window hides the rest.
    attended = max(context - (num_tokens / max(num_rows, 1) - 1) / 2, 1)
    seen = [min(context, window or context) for window in arch.layer_windows]
    num_bytes = (matrices + embedding) * itemsize + num_rows * sum(seen) * token_bytes
    flops = 2 * (matrices * num_tokens + embedding * num_rows)
    flops += (
        4 * arch.num_heads / num_shards * arch.head_size * num_tokens
        * sum(min(attended, window) for window in seen)
    )  # fmt: skip
    reading = num_bytes / chip.hbm_bytes_per_second
    computing = flops / chip.bf16_flops_per_second
    if reading >= computing:
        return Bound(seconds=reading, limited_by="memory bandwidth")
    return Bound(seconds=computing, limited_by="arithmetic")


def _shard_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    assert leaf.sharding is not None, leaf
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
