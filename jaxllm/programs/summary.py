"""Formats the decisions of a plan for the log."""

import dataclasses

import jax.numpy as jnp
from jaxllm_kernels.dense.api import XLA
from jaxllm_kernels.mla.api import LatentConfig

from jaxllm.cache_groups import describe_groups, describe_room, shown_lengths
from jaxllm.layers.latent_attention import LatentAttentionSpec
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.plan.int4 import bytes_as_int4
from jaxllm.plan.memory import format_bytes
from jaxllm.plural import counted
from jaxllm.programs.declare import num_programs


def _attention(plan: EnginePlan) -> str:
    if plan.pooling is not None and plan.pooling.sees_all:
        assert plan.state_ops is not None
        return f"attention to whole texts {plan.state_ops.self_attention.name!r}"
    keep_latents = any(isinstance(config, LatentConfig) for config in plan.attention_configs)
    if not keep_latents:
        return f"attention {plan.attention.name!r}"
    return f"latent attention {plan.attention.name!r}{_expanded(plan)}"


def _expanded(plan: EnginePlan) -> str:
    """How whole prompts are computed in models with latents."""
    mixers = (mixer for layer in plan.architecture.layers for mixer in layer.mixers)
    forms = {mixer.expanded for mixer in mixers if isinstance(mixer, LatentAttentionSpec)}
    return "".join(
        f", with keys and values by {form.op.name!r} for prompts of {form.fewest_tokens} tokens on"
        for form in forms
        if form is not None
    )


def _images(plan: EnginePlan) -> str:
    if plan.images is None:
        return ""
    # Large programs may have another.
    names = dict.fromkeys(ops.self_attention.name for ops in plan.images.ops.values())
    return f", attention between patches {' and '.join(map(repr, names))}"


def _states(plan: EnginePlan) -> str:
    if not plan.states_bytes:
        return ""
    each = format_bytes(plan.states_bytes // plan.max_num_seqs)
    its = plan.snapshots
    snapshots = "no snapshots, so no prefix caching"
    if its is not None:
        snapshots = (
            f"{counted(its.count, 'snapshot')}, at multiples of {its.stride} tokens, take "
            f"{format_bytes(plan.snapshots_bytes)}"
        )
    return (
        f"states of recurrent layers {format_bytes(plan.states_bytes)}: {each} for each of "
        f"max_num_seqs={plan.max_num_seqs} requests; {snapshots}\n"
    )


def _adapters(plan: EnginePlan) -> str:
    its = plan.adapters
    if its is None:
        return ""
    slots = f"{counted(its.max_loras, 'slot')} of rank {its.max_lora_rank}"
    return f"adapters {format_bytes(max(its.bytes_by_stage))}: {slots}\n"


def _offload(plan: EnginePlan) -> str:
    its = plan.offload
    if its is None:
        return ""
    where = f", and in {its.directory}" if its.directory is not None else ""
    groups = (
        dataclasses.replace(group, num_blocks=num_places)
        for group, num_places in zip(plan.cache_groups, its.places, strict=False)
    )
    room = describe_groups(groups, plan.block_size)
    if plan.snapshots is not None:
        room += f", {counted(its.places[-1], 'snapshot')} of states"
    return f"evicted blocks {its}{where}: {room}\n"


def _int4(plan: EnginePlan) -> str:
    num_bytes = bytes_as_int4(plan)
    if num_bytes is None:
        return ""
    size = format_bytes(num_bytes)
    return (
        f"--quantization int4 would make the weights about {size}, which every decode reads, and "
        "round them\n"
    )


def summary(plan: EnginePlan) -> str:
    """Format the decisions of a plan in a few lines."""
    arch = plan.architecture
    draft = ""
    if plan.draft is not None:
        draft = (
            f"draft {plan.draft.name}; of these bytes "
            f"{format_bytes(plan.draft.weights_bytes)} of weights and "
            f"{format_bytes(plan.draft.kv_cache_bytes)} of KV cache are its own\n"
        )
    products = "".join(f"products with {how}\n" for how in plan.coded_products)
    stages = f" in {len(plan.stages)} stages" if len(plan.stages) > 1 else ""
    return (
        f"{arch.name}, {counted(arch.num_layers, 'layer')}{stages}, "
        f"{jnp.dtype(plan.dtype).name} on {plan.chip.name}; "
        f"weights {format_bytes(plan.weights_bytes)}"
        f"{f' by {arch.scheme}' if arch.scheme is not None else ''}; {_attention(plan)}"
        f"{_images(plan)}"
        f"{', native products' if plan.matmul is not XLA else ''}"
        f"{', native sampler' if plan.sampling.op is not None else ''}"
        f"{', batch-invariant' if plan.row_sums is not None else ''}"
        f"{f', experts {plan.experts.name!r}' if plan.experts is not None else ''}"
        f"{f', recurrent layers {plan.state_ops}' if plan.states_bytes else ''}\n"
        f"KV cache {format_bytes(plan.kv_cache_bytes)}"
        f"{f' of {plan.kv_cache}' if plan.kv_cache is not None else ''}: "
        f"{describe_groups(plan.cache_groups, plan.block_size)}, room for "
        f"{describe_room(plan.room_for, shown_lengths(plan.max_model_len))} "
        f"(max_num_seqs={plan.max_num_seqs})\n"
        f"beside these {format_bytes(plan.between_bytes)} for sampling and what steps leave\n"
        f"{products}"
        f"{_int4(plan)}"
        f"{_states(plan)}"
        f"{_adapters(plan)}"
        f"{_offload(plan)}"
        f"{draft}{counted(num_programs(plan), 'program')}, "
        f"with steps of {', '.join(map(str, plan.buckets))}"
    )
