"""Turns the user's EngineConfig into an EnginePlan.

Every choice that depends on the model, the platform or the memory is made and checked here, once.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxllm_kernels.common import cdiv
from jaxllm_kernels.experts.api import ExpertsOp
from jaxllm_kernels.mla.api import LatentConfig
from jaxllm_kernels.platform import DEFAULT_BLOCK_SIZES, MIN_DOT_ROWS, Device, chip_of
from jaxllm_kernels.ragged_paged_attention.api import BatchLimits

from jaxllm.cache_groups import CacheGroup, CacheSizes, StateSnapshots, group_windows, window_of
from jaxllm.config import EngineConfig
from jaxllm.errors import refused
from jaxllm.layers.context import MixerConfig
from jaxllm.models.part import split_model
from jaxllm.models.registry import ModelRegistry
from jaxllm.models.specs import Architecture
from jaxllm.models.whole_experts import with_whole_experts
from jaxllm.parallel.sharding import TENSOR, device_bytes
from jaxllm.plan.abstract import abstract_model
from jaxllm.plan.adapters import plan_adapters
from jaxllm.plan.batch_invariance import check_invariance, check_options
from jaxllm.plan.between_steps import StepSizes
from jaxllm.plan.buckets import make_ladder, with_adapters
from jaxllm.plan.choose import (
    DEFAULTS,
    choose_dtype,
    choose_max_model_len,
    choose_max_num_batched_tokens,
    choose_speculation,
)
from jaxllm.plan.choose_kernels import (
    choose_add_norm,
    choose_attention,
    choose_experts,
    choose_head_products,
    choose_low_rank,
    choose_matmul,
    choose_row_sums,
    choose_sampling,
    free_padding,
    load_native_kernels,
    with_products,
)
from jaxllm.plan.choose_kv_cache import of_draft, with_kv_cache
from jaxllm.plan.choose_state_ops import choose_state_ops, encoder_ops
from jaxllm.plan.count_weights import count_weights
from jaxllm.plan.draft_head import plan_draft_head
from jaxllm.plan.draft_model import plan_draft_model
from jaxllm.plan.draft_plan import DraftPlan
from jaxllm.plan.embeds import given_rows, plan_embeds
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.plan.expand_latents import with_expanded_latents
from jaxllm.plan.generation_config import (
    read_default_sampling_params,
    read_eos_token_ids,
    read_max_new_tokens,
)
from jaxllm.plan.gpu_compiler import AutotuneResults, graph_options, when_to_compile
from jaxllm.plan.images import plan_images, with_images
from jaxllm.plan.memory import own_device, size_kv_cache
from jaxllm.plan.offload import plan_offload
from jaxllm.plan.pooling import read_model
from jaxllm.plan.snapshots import choose_snapshots
from jaxllm.plan.stages import (
    StagePlan,
    cache_shape,
    check_num_stages,
    check_parts,
    stage_meshes,
)
from jaxllm.quantization.config_file import read_config
from jaxllm.quantization.linear import describe_products, has_plain_experts
from jaxllm.sampling.logits_processor import load_logits_processors
from jaxllm.sampling_params import MAX_STEP_LOGPROBS
from jaxllm.weights.checkpoint import resolve_model_dir


def make_plan(
    config: EngineConfig,
    devices: Sequence[Device] | None = None,
    *,
    program_bytes: Sequence[int] | None = None,
) -> EnginePlan:
    """Decide everything that can be decided before weights are read.

    By default the devices to choose from are those of this process. They may also be of a
    compile-only topology. `program_bytes`, if known, has the bytes that the programs of each stage
    need beside their arguments.
    """
    check_options(config)
    devices = jax.devices() if devices is None else devices
    meshes = stage_meshes(devices, config.parallel)
    num_shards = meshes[0].shape[TENSOR]
    device = own_device(devices)
    model = config.model
    model_dir = resolve_model_dir(model.model, model.revision, model.download_dir)
    hf_config = read_config(model_dir)
    architecture, pooling = read_model(config, hf_config, model_dir)
    architecture, image_spec = with_images(
        config, architecture, model_dir, pools=pooling is not None
    )
    if config.parallel.enable_expert_parallel:
        architecture = with_whole_experts(architecture)
    counts_experts = config.observability.count_expert_tokens
    if counts_experts and not architecture.num_experts:
        raise refused("count_expert_tokens", True, f"{architecture.name} has no experts")
    model_class = ModelRegistry.resolve([architecture.name])
    chip = chip_of(device)
    platform = chip.platform
    dtype = choose_dtype(model.dtype, architecture, platform)
    architecture, kv_cache = with_kv_cache(
        architecture,
        config.cache,
        model_dir,
        hf_config=architecture.hf_config,
        dtype=dtype,
        reads_weights=model.load_format not in ("dummy", "orbax"),
    )
    library = load_native_kernels(
        config, chip, dtype, kv_cache and kv_cache.codes, num_shards, samples=pooling is None
    )
    max_model_len = choose_max_model_len(model.max_model_len, architecture)
    max_num_seqs = config.scheduler.max_num_seqs or DEFAULTS[platform].max_num_seqs
    is_encoder = pooling is not None and pooling.sees_all
    max_num_batched_tokens = choose_max_num_batched_tokens(
        config, platform, max_num_seqs, max_model_len, is_encoder=is_encoder
    )
    of_step = (num_shards, max_num_batched_tokens, dtype)

    def products_of(architecture: Architecture) -> Architecture:
        return with_products(architecture, chip, library, *of_step)

    architecture = products_of(architecture)
    if not model.batch_invariant:  # bits may not depend on how a prompt is cut
        architecture = with_expanded_latents(architecture, chip, library, *of_step)
    block_size = config.cache.block_size or DEFAULT_BLOCK_SIZES[platform]
    speculation = choose_speculation(config, platform, max_num_seqs, max_num_batched_tokens)

    architecture.check(num_shards)
    check_num_stages(len(meshes), architecture.num_layers)
    parts = split_model(architecture.num_layers, len(meshes))
    check_parts(parts, architecture)
    in_parts = [
        abstract_model(model_class, architecture, dtype, mesh, part)
        for part, mesh in zip(parts, meshes, strict=True)
    ]
    num_logits = in_parts[-1].num_logits
    attention_configs = tuple(c for abstract in in_parts for c in abstract.attention_configs)
    adapters = plan_adapters(
        config, in_parts, meshes, dtype, op=choose_low_rank(config, library, num_shards)
    )
    limits = BatchLimits(
        num_tokens=max_num_batched_tokens,
        num_rows=max_num_seqs,
        max_blocks=cdiv(max_model_len, block_size),
        block_size=block_size,
    )

    def experts_of(architecture: Architecture) -> ExpertsOp | None:
        return choose_experts(chip, library, architecture, *of_step)

    draft: DraftPlan | None = None
    # Without attention there is still a group, so that requests have lengths: its blocks are empty.
    windows = group_windows(map(window_of, attention_configs)) or (None,)
    if speculation is not None:
        common: dict[str, Any] = {
            "target": architecture,
            "target_dir": model_dir,
            "download_dir": model.download_dir,
            "max_model_len": max_model_len,
            "dtype": dtype,
            "mesh": meshes[0],
            "num_shards": num_shards,
            "choose_experts": experts_of,
        }
        draft = plan_draft_head(
            speculation,
            target_class=model_class,
            target_configs=attention_configs,
            caches_codes=kv_cache is not None,
            **common,
        )
        if draft is not None:
            windows = group_windows((*map(window_of, attention_configs), *draft.windows))
        if speculation.draft_model is not None:
            speculation, draft = plan_draft_model(
                speculation,
                windows=windows,
                has_latents=any(isinstance(c, LatentConfig) for c in attention_configs),
                cache=None if kv_cache is None else of_draft(config.cache, kv_cache),
                reads_weights=model.load_format not in ("dummy", "orbax"),
                max_num_batched_tokens=max_num_batched_tokens,
                choose_products=products_of,
                **common,
            )
    attention = choose_attention(
        config.compilation.attention_backend,
        chip,
        library,
        attention_configs + (() if draft is None else draft.attention_configs),
        limits,
        dtype,
        sees_ahead=image_spec is not None and image_spec.sees_all,
    )
    is_invariant = model.batch_invariant
    row_sums = choose_row_sums(library, is_invariant=is_invariant)
    encoder_tokens = max_num_batched_tokens if is_encoder else None
    state_ops = choose_state_ops(
        chip, library, architecture, in_parts, dtype, row_sums, num_shards, encoder_tokens
    )
    matmul = choose_matmul(library, in_parts, num_shards, is_invariant=is_invariant)
    buckets = make_ladder(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        min_rows=MIN_DOT_ROWS[platform],
        num_cache_groups=len(windows),
        free_padding=free_padding(attention, matmul, dtype),
        speculation=speculation,
        has_decodes=pooling is None,
    )
    is_cut = architecture.cuts_tower(num_shards)
    of_tower = functools.partial(encoder_ops, chip, library, dtype, num_shards, is_cut=is_cut)
    images = plan_images(image_spec, architecture, of_tower, limits, max_model_len)
    embeds = plan_embeds(config, architecture, images, pooling, dtype, max_num_batched_tokens)
    samples_late = not model.skip_tokenizer_init and pooling is None
    vocab_size = architecture.vocab_size
    max_logprobs = vocab_size if model.max_logprobs == -1 else min(model.max_logprobs, vocab_size)
    itemsize = jnp.dtype(dtype).itemsize
    between = StepSizes(
        num_stages=len(meshes),
        num_slots=max_num_seqs,
        num_cache_groups=len(windows),
        blocks_per_seq=limits.max_blocks,
        max_model_len=max_model_len,
        num_logits=num_logits,
        num_logprobs=min(max_logprobs, MAX_STEP_LOGPROBS),
        samples_late=samples_late,
        host_reads_logits=pooling is None and max_logprobs > MAX_STEP_LOGPROBS,
        hidden_size=architecture.hidden_size,
        itemsize=itemsize,
        largest=buckets[-1],
        given_bytes=given_rows(images, embeds) * architecture.image_width * itemsize,
        counted_experts=architecture.num_layers * max(architecture.num_experts.values())
        if counts_experts
        else 0,
        pooling=pooling,
        speculation=speculation,
        draft=draft,
    )
    sizes = CacheSizes(
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        request_len=config.cache.kv_cache_request_len,
    )

    counts = [count_weights(its, mesh) for its, mesh in zip(in_parts, meshes, strict=True)]

    def plan_stages(
        groups: Sequence[CacheGroup], snapshots: StateSnapshots | None = None
    ) -> tuple[StagePlan, ...]:
        num_blocks = {group.window: group.num_blocks for group in groups}

        def cache(config: MixerConfig, num_blocks: int, mesh: Mesh) -> jax.ShapeDtypeStruct:
            return cache_shape(attention, config, num_blocks, block_size, dtype, mesh)

        return tuple(
            StagePlan(
                index=index,
                part=part,
                mesh=mesh,
                cache_shapes=tuple(
                    cache(c, num_blocks[window_of(c)], mesh) for c in abstract.attention_configs
                ),
                state_shapes=tuple(
                    state.of_slots(max_num_seqs, mesh, state_ops)
                    for state in abstract.state_configs
                ),
                snapshot_shapes=tuple(
                    state.of_slots(snapshots.count, mesh, state_ops)
                    for state in abstract.state_configs
                    if snapshots is not None
                ),
                attention_configs=abstract.attention_configs,
                block_bytes=tuple(
                    device_bytes(cache(c, 1, mesh)) for c in abstract.attention_configs
                ),
                weights=weights,
                between=between.of_stage(mesh, part, abstract.state_configs),
                draft=None
                if draft is None
                else draft.with_caches(lambda c, n, mesh=mesh: cache(c, n, mesh), num_blocks),
            )
            for index, (part, mesh, abstract, weights) in enumerate(
                zip(parts, meshes, in_parts, counts, strict=True)
            )
        )

    num_devices = sum(mesh.size for mesh in meshes) * config.parallel.data_parallel_size
    one_block = sizes.divide(windows, num_blocks=1)
    of_adapters = (0,) * len(meshes) if adapters is None else adapters.bytes_by_stage
    snapshots = choose_snapshots(
        config.cache,
        plan_stages(one_block),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        adapters_bytes=of_adapters,
        num_devices=num_devices,
    )
    num_blocks = min(
        size_kv_cache(
            config.cache,
            weights_bytes=stage.weights_bytes,
            states_bytes=stage.states_bytes,
            snapshots_bytes=stage.snapshots_bytes,
            adapters_bytes=of_adapters[stage.index],
            other_bytes=stage.between.num_bytes,
            cache_bytes=lambda n, stage=stage: stage.cache_bytes(sizes.divide(windows, n)),
            min_blocks=sizes.max_blocks(windows[0]),
            max_num_seqs=max_num_seqs,
            device=own_device(stage.mesh.devices.flat),
            num_devices=num_devices,
            program_bytes=program_bytes[stage.index] if program_bytes is not None else None,
        )
        for stage in plan_stages(one_block, snapshots)
    )
    cache_groups = sizes.divide(windows, num_blocks)
    stages = plan_stages(cache_groups, snapshots)
    results = config.compilation.gpu_autotune_results
    plan = EnginePlan(
        model_name=model.model,
        model_dir=model_dir,
        architecture=architecture,
        model_class=model_class,
        chip=chip,
        dtype=dtype,
        load_format=model.load_format,
        seed=model.seed,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        cache_groups=cache_groups,
        kv_cache=kv_cache,
        num_logits=num_logits,
        attention=attention,
        attention_configs=attention_configs,
        matmul=matmul,
        head_products=choose_head_products(library, attention_configs, num_shards),
        # Experts with codes have implementations of their own.
        experts=experts_of(architecture) if any(map(has_plain_experts, in_parts)) else None,
        counts_experts=counts_experts,
        coded_products=tuple(
            dict.fromkeys(how for abstract in in_parts for how in describe_products(abstract))
        ),
        state_ops=state_ops,
        snapshots=snapshots,
        sampling=choose_sampling(
            config, chip, library, num_shards, row_sums, samples=pooling is None
        ),
        add_norm=choose_add_norm(chip, num_shards),
        row_sums=row_sums,
        stages=stages,
        offload=plan_offload(
            config.cache, config.hand_over, stages, cache_groups, snapshots, model_dir
        ),
        buckets=buckets if adapters is None else with_adapters(buckets),
        adapters=adapters,
        pooling=pooling,
        images=images,
        embeds=embeds,
        max_logprobs=max_logprobs,
        samples_late=samples_late,
        logits_processors=load_logits_processors(model.logits_processors, config),
        eos_token_ids=read_eos_token_ids(
            model_dir, of_config=architecture.eos_token_ids, vocab_size=vocab_size
        ),
        default_sampling_params=read_default_sampling_params(model, model_dir),
        max_new_tokens=read_max_new_tokens(model, model_dir),
        compiles=when_to_compile(config.compilation, chip),
        speculation=speculation,
        graph_options=graph_options(config.compilation.gpu_graphs, chip),
        autotune_results=AutotuneResults.read(results, chip) if results else None,
    )
    if is_invariant:
        check_invariance(plan)
    return plan
