"""What all programs of a stage need beside what is always there, known before all are compiled."""

from collections.abc import Hashable, Mapping

import jax
from jaxllm_kernels.common import cdiv

from jaxllm.media.device import most_patches
from jaxllm.parallel.sharding import device_bytes
from jaxllm.plan.buckets import Bucket
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.programs.compile import Program
from jaxllm.programs.declare import (
    WRITE_ADAPTER,
    WRITE_EMBEDS,
    WRITE_SLOT,
    BlocksKey,
    EncodeKey,
    LateKey,
)
from jaxllm.programs.drafting import ADMIT_DRAFTS, DRAFT_AHEAD, ReadKey


def needed_bytes(
    plan: EnginePlan, programs: Mapping[Hashable, Program], *, temp_bytes: int, code_bytes: int
) -> int:
    """The most temporaries at a time, the code of all programs, and what the host uploads for them.

    `temp_bytes` and `code_bytes` are those of the largest step. Other programs count as long as it,
    but not those that sample late rows, which have no layers, and those of a tower. All of a kind
    have about the same code. The largest of each is compiled here.
    """
    num_others, more_code = len(programs), 0
    for kind in (LateKey, EncodeKey):
        its = [key for key in programs if isinstance(key, kind)]
        if not its:
            continue
        largest = programs[max(its)]
        memory = largest.compile(largest.lower()).memory_analysis()
        num_others -= len(its)
        if memory is not None:
            temp_bytes = max(temp_bytes, memory.temp_size_in_bytes)
            more_code += memory.generated_code_size_in_bytes * len(its)
    return temp_bytes + code_bytes * num_others + more_code + uploaded_bytes(plan, programs)


def uploaded_bytes(plan: EnginePlan, programs: Mapping[Hashable, Program]) -> int:
    """The most bytes that uploads of the host take on a device: of the steps in flight and of the
    next one, and, for the next one, of all that programs write before it."""
    largest: dict[Hashable, int] = {}
    for key, program in programs.items():
        kind = type(key) if isinstance(key, Bucket | LateKey | EncodeKey | ReadKey) else key
        size = sum(map(device_bytes, jax.tree.leaves(_uploaded(key, program))))
        largest[kind] = max(largest.get(kind, 0), size)
    # A step may admit a request to each slot, each with an adapter that has no slot of the device
    # yet, and write as many embeddings as it computes. No upload waits for the program before.
    counts: dict[Hashable, int] = {WRITE_SLOT: plan.max_num_seqs, ADMIT_DRAFTS: plan.max_num_seqs}
    if plan.adapters is not None:
        counts[WRITE_ADAPTER] = min(plan.adapters.max_loras, plan.max_num_seqs)
    if (embeds := plan.embeds) is not None:
        counts[WRITE_EMBEDS] = embeds.num_rows // embeds.rows_per_write
    if (images := plan.images) is not None:
        most = most_patches(
            images.sizes,
            max_patches=images.num_rows * images.spec.patches_per_token,
            max_images=plan.max_num_batched_tokens,
        )
        counts[EncodeKey] = cdiv(most, images.sizes[-1])
    counts |= dict.fromkeys((Bucket, LateKey, DRAFT_AHEAD), 1 + len(plan.stages))
    return sum(size * counts.get(kind, 1) for kind, size in largest.items())


def _uploaded(key: Hashable, program: Program) -> object:
    """The arguments of a program that the host has made."""
    if isinstance(key, Bucket):
        return program.arguments[2]
    if isinstance(key, LateKey):
        return program.arguments[-1]
    if isinstance(key, BlocksKey) or not program.donate:
        return ()  # blocks stay in the host's memory
    return program.arguments[program.donate[0] + 1 :]
