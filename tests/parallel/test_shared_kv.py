"""A model whose layers share caches, with heads of two sizes and some windows, answers on several
devices as on one: cut, and in stages that have both who lends and who borrows."""

import pytest

from jaxllm.testing import make_tiny_checkpoint

KINDS = ["sliding_attention", "full_attention"]
FEW_BLOCKS = {"block_size": 4, "num_gpu_blocks_override": 36}
VARIANTS = {
    "stages of shards": {"pipeline_parallel_size": 2, "tensor_parallel_size": 4, **FEW_BLOCKS},
    "shards": {"tensor_parallel_size": 4, "enable_prefix_caching": False, **FEW_BLOCKS},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["stages of shards", pytest.param("shards", marks=pytest.mark.sweep)]
)
def test_several_devices_give_the_same_tokens(engines, tmp_path, same_answers, name):
    model_dir = make_tiny_checkpoint(
        tmp_path,
        "gemma4",
        num_hidden_layers=8,
        layer_types=4 * KINDS,
        # The last two of the second stage's layers share with its first two.
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        sliding_window=24,
    )
    # Each answers twice.
    one, several = engines(model_dir, {}, VARIANTS[name], again=True)
    same_answers(several, one)
    metrics = several["metrics"]
    assert metrics["num_preemptions"] > 0
    assert (metrics["prefix_cache_hits"] > 0) == (name == "stages of shards")
