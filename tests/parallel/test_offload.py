"""Blocks of an engine on several devices go to the host and come back, each device's part to where
it was."""

import pytest

FEW = {"num_gpu_blocks_override": 20, "kv_offloading_size": 0.002, "check_invariants": True}
VARIANTS = {
    "one": {},
    "shards": {"tensor_parallel_size": 4, **FEW},
    "stages of shards": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, **FEW},
}


@pytest.fixture(scope="module")
def answered(engines, sharded_model):
    its = engines(sharded_model, *VARIANTS.values(), again=True)
    return dict(zip(VARIANTS, its, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shards", "stages of shards"])
def test_the_answers_are_the_same(answered, same_answers, name):
    same_answers(answered[name], answered["one"])
    metrics = answered[name]["metrics"]
    assert metrics["num_preemptions"] > 0
    assert metrics["kv_offload_load_blocks"] > 4
    assert metrics["external_prefix_cache_hits"] > 0
