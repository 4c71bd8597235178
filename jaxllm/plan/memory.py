"""Chooses how many KV blocks fit: the memory side of the plan."""

import resource
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import jax
from jaxllm_kernels.platform import Device, chip_of

from jaxllm.cache_groups import num_fitting
from jaxllm.config import CacheConfig
from jaxllm.errors import OutOfMemoryError, ValidationError
from jaxllm.metrics.memory import DeviceMemory
from jaxllm.runner.jax_setup import gpu_pool_share

# On a CPU, the cache's share of the memory that is free after the weights. The machine has other
# work, and a cache of this size is rarely the limit there.
_CPU_SHARE = 0.4
# On accelerators, the share kept for the memory of programs until that is known.
_PROGRAM_SHARE = 0.08


def size_kv_cache(
    config: CacheConfig,
    *,
    weights_bytes: int,
    other_bytes: int,
    cache_bytes: Callable[[int], int],
    min_blocks: int,
    max_num_seqs: int,
    device: Device,
    num_devices: int = 1,
    states_bytes: int = 0,
    snapshots_bytes: int = 0,
    adapters_bytes: int = 0,
    program_bytes: int | None = None,
) -> int:
    """Choose the number of KV blocks, or refuse with the shortfall before anything is loaded.

    Blocks are those of the first cache group. `cache_bytes` returns the bytes of so many blocks and
    of the other groups' blocks, which follow from them. A request holds at most `min_blocks`. Sizes
    are those of one device. The engine and its replicas have `num_devices`; CPU devices share the
    host's memory. `states_bytes` are those of the states of recurrent layers, for all slots.

    One request of the maximum length must fit, so that no accepted request can wait for ever. If
    the user sets a size, the cache has this size. Otherwise cached prefixes may fill an
    accelerator's memory, which nothing else uses; on a CPU the cache takes at most what all slots
    can use at once.
    """
    useful = min_blocks * max_num_seqs
    free = free_bytes(config, device, num_devices)
    fixed = weights_bytes + other_bytes + states_bytes + snapshots_bytes + adapters_bytes
    has_blocks = cache_bytes(1) > 0  # no layer has, if there is no attention
    needed = fixed + cache_bytes(min_blocks)
    if config.num_gpu_blocks_override is not None:
        num_blocks, source = config.num_gpu_blocks_override, "num_gpu_blocks_override"
        needed = fixed + cache_bytes(num_blocks)
    elif config.kv_cache_memory_bytes is not None:
        room = config.kv_cache_memory_bytes
        num_blocks = num_fitting(cache_bytes, room) if has_blocks else useful
        source = "kv_cache_memory_bytes"
        needed = fixed + cache_bytes(num_blocks)
    else:
        left = max(0, free - fixed)
        if device.platform == "cpu":
            room = int(left * _CPU_SHARE)
        elif program_bytes is None:
            room = int(left * (1 - _PROGRAM_SHARE))
        else:
            room = max(0, left - program_bytes)
        num_blocks = num_fitting(cache_bytes, room) if has_blocks else useful
        if device.platform == "cpu":
            # The next start may find a little more or less free memory. It should choose the same
            # number, which is in all programs' shapes, so that it finds them in the cache.
            num_blocks = max(_power_of_two(num_blocks), min(num_blocks, min_blocks))
        if device.platform == "cpu" or config.enable_prefix_caching is False:
            num_blocks = min(num_blocks, useful)
        source = "the free memory"
    if needed > free:
        raise OutOfMemoryError(
            f"each device has {format_bytes(free)} free and needs {format_bytes(needed)}: weights "
            f"{format_bytes(weights_bytes)}, a KV cache of at least {format_bytes(needed - fixed)} "
            f"{_of_states(states_bytes, snapshots_bytes, max_num_seqs)}"
            f"{_of_adapters(adapters_bytes)}"
            f"and {format_bytes(other_bytes)} of sampler "
            "state and outputs; "
            f"{format_bytes(needed - free)} are missing. Use more devices (tensor_parallel_size), "
            "or a smaller model or dtype, or lower max_model_len or kv_cache_memory_bytes"
            f"{' or max_num_seqs' if states_bytes else ''}"
            f"{' or num_state_snapshots' if snapshots_bytes else ''}"
            f"{' or max_loras' if adapters_bytes else ''}"
        )
    if num_blocks < min_blocks:
        raise ValidationError(
            f"{source} gives {num_blocks} KV blocks ({format_bytes(cache_bytes(num_blocks))}), "
            f"but one request of max_model_len needs {min_blocks} "
            f"({format_bytes(cache_bytes(min_blocks))}); lower max_model_len or raise "
            f"{source if source != 'the free memory' else 'kv_cache_memory_bytes'}",
            parameter="max_model_len",
        )
    return num_blocks


def _of_states(states_bytes: int, snapshots_bytes: int, max_num_seqs: int) -> str:
    if not states_bytes:
        return ""
    each = format_bytes(states_bytes // max_num_seqs)
    return (
        f"{format_bytes(states_bytes)} of states, {each} for each of {max_num_seqs} requests, "
        f"{format_bytes(snapshots_bytes)} of snapshots of them, "
    )


def _of_adapters(adapters_bytes: int) -> str:
    return f"{format_bytes(adapters_bytes)} for adapters, " if adapters_bytes else ""


def format_bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def _power_of_two(number: int) -> int:
    """The largest power of two that is at most the number."""
    return 1 << number.bit_length() >> 1


def peak_host_bytes() -> int:
    """The peak memory of this process, pages of mapped files included."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Without /proc this is in bytes. On Linux it would be in KiB, and perhaps the parent's peak.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def device_memory(devices: Iterable[Device]) -> list[DeviceMemory]:
    """The memory use of devices of this process; devices that do not report it are left out."""
    found = []
    for device in devices:
        stats = _memory_stats(device)
        if stats:
            used = stats.get("bytes_in_use", 0)
            found.append(
                DeviceMemory(
                    device=device.id,
                    used_bytes=used,
                    peak_bytes=stats.get("peak_bytes_in_use", used),
                    limit_bytes=stats.get("bytes_limit", 0),
                )
            )
    return found


def own_device(devices: Iterable[Device]) -> Device:
    """A device of this process, since only such ones report their memory. If there is none, as in a
    compile-only topology, the first."""
    first, *others = devices
    return next((d for d in (first, *others) if d.process_index == jax.process_index()), first)


def _memory_stats(device: Device) -> Mapping[str, int]:
    try:
        return device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:
        return {}  # a device of a compile-only topology


def free_bytes(config: CacheConfig, device: Device, num_devices: int) -> int:
    """How much of the device's memory the engine may take."""
    if device.platform == "cpu":
        return _available_host_bytes() // num_devices
    stats = _memory_stats(device)
    limit = whole = stats.get("bytes_limit", chip_of(device).hbm_bytes)
    if stats and device.platform == "gpu":
        whole = limit / gpu_pool_share()
    return int(min(limit, whole * config.gpu_memory_utilization)) - stats.get("bytes_in_use", 0)


def _available_host_bytes() -> int:
    """MemAvailable, but at most what the cgroup allows: containers report the host's memory."""
    available = 2**62
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available
