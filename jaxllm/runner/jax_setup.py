"""What JAX has to be told by an engine, before any device is touched."""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxllm.config import EngineConfig
from jaxllm.logging import init_logger

logger = init_logger(__name__)

# The share of a GPU's memory that XLA takes as its own pool when it starts; the second name is old.
_GPU_POOL_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# Without either.
_GPU_POOL_DEFAULT = 0.75


def set_up_jax(config: EngineConfig) -> None:
    """First of all: planning for an accelerator compiles a step on it."""
    if not any(os.environ.get(name) for name in _GPU_POOL_NAMES):
        # Weights, caches and what programs need all lie in the pool.
        os.environ[_GPU_POOL_NAMES[0]] = str(config.cache.gpu_memory_utilization)
    use_compilation_cache(config.compilation.compilation_cache_dir)


def gpu_pool_share() -> float:
    """The share of a GPU's memory that XLA would take for its pool if it started now."""
    given = next(filter(None, map(os.environ.get, _GPU_POOL_NAMES)), None)
    return float(given) if given else _GPU_POOL_DEFAULT


def use_compilation_cache(name: str | None) -> None:
    """Keep every compiled program on disk, however small, so that the next start is fast.

    The setting is the process's: without a name it stays as it is.
    """
    if not name:
        return
    directory = Path(name).expanduser()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("no compilation cache: cannot write %s (%s)", directory, error.strerror)
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # JAX opens a directory once in a process; this makes it open the new one.
    compilation_cache.reset_cache()
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # Otherwise the path of the cache becomes part of every key.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
