"""A model with states of all kinds answers on several devices as on one: cut by heads, with fewer
groups than shards, and in stages that each have the states of their layers."""

import pytest

from jaxllm.testing import make_tiny_checkpoint

VARIANTS = {
    "one": {},
    # Few blocks, so that requests begin anew.
    "shards": {"tensor_parallel_size": 2, "num_gpu_blocks_override": 18},
    "stages": {"pipeline_parallel_size": 2},
}


@pytest.fixture(scope="module")
def answered(engines, tmp_path_factory):
    """What each of these engines answers."""
    model_dir = make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "granitemoehybrid")
    return dict(zip(VARIANTS, engines(model_dir, *VARIANTS.values()), strict=True))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "one"])
def test_several_devices_give_the_same_tokens(answered, same_answers, name):
    same_answers(answered[name], answered["one"])


def test_the_cut_engine_preempted(answered):
    preemptions = {name: one["metrics"]["num_preemptions"] for name, one in answered.items()}
    assert preemptions["shards"] > 0 and preemptions["one"] == 0
