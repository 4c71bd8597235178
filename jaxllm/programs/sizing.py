"""Plans an engine on an accelerator, with a KV cache as large as its programs allow.

The memory of a program besides its arguments is known only after compilation. So this compiles the
largest step of a first plan, reads its memory, and makes the plan again.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxllm_kernels.platform import Device

from jaxllm.config import CacheConfig, EngineConfig
from jaxllm.errors import JaxLLMError
from jaxllm.logging import init_logger
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.plan.make_plan import make_plan
from jaxllm.plan.memory import format_bytes
from jaxllm.plan.stages import StagePlan
from jaxllm.programs.bundle import open_bundle, warn
from jaxllm.programs.declare import declare_stage_programs, make_packer
from jaxllm.programs.needs import needed_bytes
from jaxllm.programs.progress import CompileProgress

logger = init_logger(__name__)


def plan_engine(config: EngineConfig, devices: Sequence[Device] | None = None) -> EnginePlan:
    """Plan an engine for these devices (default: the local ones). If it has a bundle of programs
    that fits, plan for that."""
    if config.compilation.program_bundle:
        directory = Path(config.compilation.program_bundle).expanduser()
        plan = _plan_for_bundle(config, devices, directory)
        if plan is not None:
            return plan
    plan = make_plan(config, devices)
    if plan.chip.platform == "cpu" or _says_how_large(config.cache):
        return plan
    program_bytes = []
    with CompileProgress(len(plan.stages)) as progress:
        for stage in plan.stages:
            with progress.compiling("the largest, to see what memory it leaves"):
                program_bytes.append(_program_bytes(plan, stage))
    logger.info("programs need up to %s beside weights and cache", format_bytes(max(program_bytes)))
    return make_plan(config, devices, program_bytes=program_bytes)


def _plan_for_bundle(
    config: EngineConfig, devices: Sequence[Device] | None, directory: Path
) -> EnginePlan | None:
    """The plan with the number of blocks of the bundle's programs; None if the bundle does not fit
    the plan."""
    bundle = open_bundle(directory)
    if bundle is None:
        return None
    if not _says_how_large(config.cache):
        cache = dataclasses.replace(config.cache, num_gpu_blocks_override=bundle.num_blocks)
        config = dataclasses.replace(config, cache=cache)
    try:
        plan = make_plan(config, devices)
        bundle.check(plan)
    except JaxLLMError as error:
        warn(directory, error)
        return None
    return dataclasses.replace(plan, program_bundle=directory)


def _says_how_large(cache: CacheConfig) -> bool:
    return bool(cache.num_gpu_blocks_override or cache.kv_cache_memory_bytes)


def _program_bytes(plan: EnginePlan, stage: StagePlan) -> int:
    """What the programs need, seen from the largest step, plus a 512th of the memory: the programs
    of the final plan have another number of blocks, and one was seen to need a thousandth of the
    memory more."""
    programs = declare_stage_programs(plan, stage, make_packer(plan).layouts)
    largest = programs[
        max(plan.buckets, key=lambda bucket: (bucket.num_tokens, bucket.has_adapters))
    ]
    memory = largest.compile(largest.lower()).memory_analysis()
    if memory is None:
        return 0
    needed = needed_bytes(
        plan,
        programs,
        temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
    )
    return needed + plan.chip.hbm_bytes // 512
