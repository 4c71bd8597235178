"""Blocks of an engine on several devices go to the host and come back, each device's part to where
it was."""

import pytest

FEW = {"num_gpu_blocks_override": 20, "kv_offloading_size": 0.002, "check_invariants": True}
VARIANTS = {
    "shards": {"tensor_parallel_size": 4, **FEW},
    "stages of shards": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, **FEW},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["stages of shards", pytest.param("shards", marks=pytest.mark.sweep)]
)
def test_the_answers_are_the_same(engines, sharded_model, same_answers, name):
    one, several = engines(sharded_model, {}, VARIANTS[name], again=True)
    same_answers(several, one)
    metrics = several["metrics"]
    assert metrics["num_preemptions"] > 0
    assert metrics["kv_offload_load_blocks"] > 4
    assert metrics["external_prefix_cache_hits"] > 0
