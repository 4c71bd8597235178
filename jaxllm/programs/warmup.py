"""Compiles all programs of an engine into the compilation cache, without its weights.

It declares and compiles programs by the same code as an engine's start. So they are the same, and a
later engine with the same options finds every one.
"""

from dataclasses import dataclass
from pathlib import Path

import jax

from jaxllm.config import EngineConfig
from jaxllm.errors import JaxLLMError, ValidationError, refused
from jaxllm.logging import init_logger
from jaxllm.plan.memory import format_bytes
from jaxllm.plan.stages import replica_devices
from jaxllm.plural import counted
from jaxllm.programs.compile import CompileReport, Programs
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.sizing import plan_engine
from jaxllm.programs.store import ProgramStore
from jaxllm.programs.summary import summary
from jaxllm.runner.jax_setup import set_up_jax

logger = init_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class WarmupReport:
    """The programs that were compiled, by replica, and the contents of the cache."""

    replicas: list[CompileReport]
    cache_dir: str
    num_files: int
    num_bytes: int

    def __str__(self) -> str:
        return "\n".join(
            [
                *map(str, self.replicas),
                f"compilation cache {self.cache_dir}: {counted(self.num_files, 'file')}, "
                f"{format_bytes(self.num_bytes)}",
            ]
        )


def warm_up(config: EngineConfig) -> WarmupReport:
    """Compile every program of an engine into the compilation cache."""
    if config.compilation.enforce_eager:
        raise ValidationError(
            "enforce_eager=True asks to compile nothing ahead; leave it out to warm up",
            parameter="enforce_eager",
            value=True,
        )
    if config.parallel.nnodes != 1:
        raise refused(
            "nnodes",
            config.parallel.nnodes,
            "programs over several hosts are compiled by all of them together; start the engine",
        )
    set_up_jax(config)
    cache_dir = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if not cache_dir:
        raise JaxLLMError(
            "there is no compilation cache to fill; give --compilation-cache-dir a directory that "
            "can be written"
        )
    replicas = []
    for replica in range(config.parallel.data_parallel_size):
        plan = plan_engine(config, replica_devices(config.parallel, replica))
        logger.info("plan: %s", summary(plan))
        declared = declare_programs(plan, make_packer(plan).layouts)
        programs = Programs(declared, store=ProgramStore.of(plan))
        replicas.append(programs.compile_all())
    files = [entry for entry in Path(cache_dir).rglob("*") if entry.is_file()]
    return WarmupReport(
        replicas=replicas,
        cache_dir=cache_dir,
        num_files=len(files),
        num_bytes=sum(entry.stat().st_size for entry in files),
    )
