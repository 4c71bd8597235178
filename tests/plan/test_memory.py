"""How many KV blocks the plan chooses."""

import os
from types import SimpleNamespace

import jax
import pytest
from jaxllm_kernels.platform import CHIPS

from jaxllm.config import CacheConfig, EngineConfig
from jaxllm.errors import OutOfMemoryError
from jaxllm.plan import memory
from jaxllm.plan.memory import own_device, size_kv_cache
from jaxllm.runner.jax_setup import gpu_pool_share, set_up_jax


@pytest.fixture
def num_blocks():
    def num_blocks(device=None, program_bytes=None, num_devices=1, block_bytes=64, **options):
        return size_kv_cache(
            CacheConfig(**options),
            weights_bytes=1000,
            other_bytes=1000,
            cache_bytes=lambda number: number * block_bytes,
            num_devices=num_devices,
            min_blocks=4,
            max_num_seqs=2,
            device=device or jax.devices("cpu")[0],
            program_bytes=program_bytes,
        )

    return num_blocks


def test_what_the_user_asks_for_is_what_he_gets(num_blocks):
    assert num_blocks(kv_cache_memory_bytes=64 * 1000) == 1000
    assert num_blocks(num_gpu_blocks_override=1000) == 1000


def test_a_host_gives_what_all_slots_can_use(num_blocks):
    assert num_blocks() == 8
    assert num_blocks(enable_prefix_caching=False) == 8


class Accelerator:
    """A device of the table of chips, with all of its memory free."""

    platform, device_kind = "tpu", "TPU v6e"

    def memory_stats(self):
        return None


def test_cached_prefixes_may_fill_an_accelerator(num_blocks):
    limit = int(CHIPS["v6e"].hbm_bytes * 0.92)
    assert num_blocks(Accelerator(), program_bytes=5000) == (limit - 7000) // 64
    assert num_blocks(Accelerator(), enable_prefix_caching=False) == 8


class GPU:
    """A GPU of 1,000,000 bytes, of which XLA took a share for its pool."""

    platform, device_kind = "gpu", "a GPU that the table of chips lacks"

    def __init__(self, share):
        self._share = share

    def memory_stats(self):
        return {"bytes_limit": int(1_000_000 * self._share), "bytes_in_use": 500}


POOL = "XLA_CLIENT_MEM_FRACTION"


@pytest.mark.parametrize(
    "environment, pool, engine",
    [
        ({POOL: "0.92"}, 0.92, 0.92),
        ({POOL: "0.5"}, 0.5, 0.5),  # a smaller one, as somebody wants it
        ({POOL: "0.98"}, 0.98, 0.92),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.98"}, 0.98, 0.92),
        ({POOL: "0.92"}, 0.75, 0.75),  # JAX had started before it was set
        ({}, 0.75, 0.75),
    ],
)
def test_an_engine_takes_its_share_of_a_gpu(num_blocks, monkeypatch, environment, pool, engine):
    for name in (POOL, "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    for name, share in environment.items():
        monkeypatch.setenv(name, share)
    found = num_blocks(GPU(pool), program_bytes=5000)
    assert found * 64 == pytest.approx(1_000_000 * engine - 7500, abs=65)
    fewer = num_blocks(GPU(pool), program_bytes=5000, gpu_memory_utilization=0.3)
    whole = pool / float(next(iter(environment.values()), 0.75))
    assert fewer * 64 == pytest.approx(300_000 * whole - 7500, abs=65)


@pytest.mark.parametrize("given", [None, POOL, "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_the_pool_of_a_gpu_is_as_large_as_the_engine(monkeypatch, given):
    for name in (POOL, "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(given, "0.6")
    set_up_jax(EngineConfig.create("m", gpu_memory_utilization=0.8, compilation_cache_dir=""))
    assert gpu_pool_share() == (0.8 if given is None else 0.6)
    # XLA takes one of them only.
    assert (POOL in os.environ) is (given != "XLA_PYTHON_CLIENT_MEM_FRACTION")


def test_cpu_devices_share_the_memory_of_their_host(num_blocks, monkeypatch):
    monkeypatch.setattr(memory, "_available_host_bytes", lambda: 2000 + 64 * 1000)
    assert num_blocks(kv_cache_memory_bytes=64 * 900) == 900
    with pytest.raises(OutOfMemoryError, match="are missing"):
        num_blocks(kv_cache_memory_bytes=64 * 900, num_devices=2)


def test_a_little_more_free_memory_makes_no_other_programs(num_blocks, monkeypatch):
    def blocks_with(free):
        monkeypatch.setattr(memory, "_available_host_bytes", lambda: free)
        return num_blocks(block_bytes=6400)

    assert {blocks_with(free) for free in range(100_000, 129_000, 1000)} == {4}
    assert blocks_with(130_500) == 8


def test_a_rank_asks_a_device_of_its_own():
    here, there = (SimpleNamespace(process_index=rank) for rank in (jax.process_index(), 7))
    assert own_device([there, here, there]) is here
    assert own_device([there]) is there
