"""A model whose layers share caches, with heads of two sizes and some windows, answers on several
devices as on one: cut, and in stages that have both who lends and who borrows."""

import pytest

from jaxllm.testing import make_tiny_checkpoint

KINDS = ["sliding_attention", "full_attention"]
FEW_BLOCKS = {"block_size": 4, "num_gpu_blocks_override": 36, "enable_prefix_caching": False}
VARIANTS = {
    "one": {},
    "shards": {"tensor_parallel_size": 4, **FEW_BLOCKS},
    "stages of shards": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def answered(engines, tmp_path_factory):
    """What each of these engines answers, twice."""
    model_dir = make_tiny_checkpoint(
        tmp_path_factory.mktemp("model"),
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
    return dict(zip(VARIANTS, engines(model_dir, *VARIANTS.values(), again=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "one"])
def test_several_devices_give_the_same_tokens(answered, same_answers, name):
    same_answers(answered[name], answered["one"])


@pytest.mark.slow
def test_the_engines_went_the_ways_that_they_should(answered):
    metrics = {name: one["metrics"] for name, one in answered.items()}
    assert metrics["stages of shards"]["prefix_cache_hits"] > 0
    assert metrics["shards"]["num_preemptions"] > 0
