"""A model with states of all kinds answers on several devices as on one: cut by heads, with fewer
groups than shards, in stages that each have the states of their layers."""

import pytest

from jaxllm.testing import make_tiny_checkpoint

SHARDS, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
FEW_BLOCKS = {"num_gpu_blocks_override": 18}
VARIANTS = {
    # Few blocks, so that requests begin anew.
    "stages of shards": SHARDS | STAGES | FEW_BLOCKS,
    "shards": SHARDS | FEW_BLOCKS,
    "stages": STAGES,
}


@pytest.mark.parametrize(
    "names",
    [["stages of shards"], pytest.param(["shards", "stages"], marks=pytest.mark.sweep)],
    ids=" and ".join,
)
def test_several_devices_give_the_same_tokens(engines, tmp_path, same_answers, names):
    model_dir = make_tiny_checkpoint(tmp_path, "granitemoehybrid")
    one, *others = engines(model_dir, {}, *(VARIANTS[name] for name in names))
    for other in others:
        same_answers(other, one)
    assert others[0]["metrics"]["num_preemptions"] > 0 == one["metrics"]["num_preemptions"]
