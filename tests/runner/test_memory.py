"""How many KV blocks the plan chooses."""

import jax
import pytest

from jaxllm.config import CacheConfig
from jaxllm.runner.memory import size_kv_cache


@pytest.fixture
def num_blocks():
    def num_blocks(**options):
        return size_kv_cache(
            CacheConfig(**options),
            weights_bytes=1000,
            other_bytes=1000,
            block_bytes=64,
            blocks_per_seq=4,
            max_num_seqs=2,
            device=jax.devices("cpu")[0],
        )

    return num_blocks


def test_what_the_user_asks_for_is_what_he_gets(num_blocks):
    assert num_blocks(kv_cache_memory_bytes=64 * 1000) == 1000
    assert num_blocks(num_gpu_blocks_override=1000) == 1000


def test_default_has_room_for_all_slots_and_for_cached_prefixes(num_blocks):
    assert num_blocks() == 16
    assert num_blocks(enable_prefix_caching=False) == 8
