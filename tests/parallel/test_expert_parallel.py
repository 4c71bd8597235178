"""Experts cut over devices, or spread over them, answer as on one device."""

import pytest

from jaxllm.testing import make_tiny_checkpoint

WAYS = {
    "one": {},
    "cut in 2": {"tensor_parallel_size": 2},
    "cut in 4": {"tensor_parallel_size": 4},
    "spread over 2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "spread over 4": {"tensor_parallel_size": 4, "enable_expert_parallel": True},
    "spread over 2, in stages": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "enable_expert_parallel": True,
    },
}


@pytest.fixture(scope="module")
def answered(engines, tmp_path_factory):
    """What an engine answers that runs the model in each of these ways."""
    # The first layer has no experts; the others have a shared MLP, too.
    model = make_tiny_checkpoint(
        tmp_path_factory.mktemp("experts"),
        "qwen2_moe",
        num_attention_heads=4,
        num_hidden_layers=3,
        mlp_only_layers=[0],
    )
    return dict(zip(WAYS, engines(model, *WAYS.values()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way != "one"])
def test_any_number_of_devices_gives_the_same_tokens(answered, same_answers, way):
    same_answers(answered[way], answered["one"])
