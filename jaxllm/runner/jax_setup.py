"""The settings of JAX that an engine makes before JAX touches a device."""

import importlib.metadata
import importlib.util
import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxllm.config import EngineConfig
from jaxllm.logging import init_logger

logger = init_logger(__name__)

# The share of a GPU's memory that XLA takes as its pool when it starts. The second name is old.
_GPU_POOL_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# XLA's share when neither is set.
_GPU_POOL_DEFAULT = 0.75

# Environment variables of machines with TPUs.
_TPU_NAMES = ("TPU_ACCELERATOR_TYPE", "TPU_NAME", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID")
_GOOGLE = "0x1ae0"  # Google's PCI vendor id


def set_up_jax(config: EngineConfig) -> None:
    """Configure JAX for an engine. Call it before planning, which may compile on the device."""
    leave_out_absent_tpu()
    if not any(os.environ.get(name) for name in _GPU_POOL_NAMES):
        # Weights, caches and the memory of programs all lie in the pool.
        os.environ[_GPU_POOL_NAMES[0]] = str(config.cache.gpu_memory_utilization)
    use_compilation_cache(config.compilation.compilation_cache_dir)


def leave_out_absent_tpu() -> None:
    """Keep JAX from trying a TPU that is not there. libtpu is installed to plan for TPUs on any
    machine, and would print several warnings.

    This has no effect if the user has set the platforms, or if JAX can try another accelerator.
    """
    is_decided = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if is_decided or importlib.util.find_spec("libtpu") is None or _may_have_tpu():
        return
    if not importlib.metadata.entry_points(group="jax_plugins"):
        jax.config.update("jax_platforms", "cpu")


def _may_have_tpu() -> bool:
    """Whether the machine has a sign of a TPU: a device, or an environment variable."""
    if any(os.environ.get(name) for name in _TPU_NAMES):
        return True
    devices = Path("/dev")
    if any(devices.glob("accel*")) or any(devices.glob("vfio/[0-9]*")):
        return True
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return any(vendor.read_text().strip() == _GOOGLE for vendor in vendors)


def gpu_pool_share() -> float:
    """The share of a GPU's memory that XLA would take for its pool if it started now."""
    given = next(filter(None, map(os.environ.get, _GPU_POOL_NAMES)), None)
    return float(given) if given else _GPU_POOL_DEFAULT


def use_compilation_cache(name: str | None) -> None:
    """Keep every compiled program on disk, however small, so that the next start is fast.

    The setting belongs to the process. Without a name it stays as it is.
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
    # JAX opens a directory once in a process. This makes it open the new one.
    compilation_cache.reset_cache()
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # Otherwise the path of the cache becomes part of every key.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
