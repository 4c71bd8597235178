"""Experts cut over devices, or spread over them, answer as on one device."""

import pytest

from jaxllm.testing import make_tiny_checkpoint

WAYS = {
    "one": {},
    "spread over 2, in stages": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "enable_expert_parallel": True,
    },
}
OTHER_WAYS = {
    "one": {},
    "cut in 2": {"tensor_parallel_size": 2},
    "cut in 4": {"tensor_parallel_size": 4},
    "spread over 2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "spread over 4": {"tensor_parallel_size": 4, "enable_expert_parallel": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # The first layer has no experts; the others have a shared MLP, too.
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("experts"),
        "qwen2_moe",
        num_attention_heads=4,
        num_hidden_layers=3,
        mlp_only_layers=[0],
    )


@pytest.mark.parametrize(
    "ways",
    [
        [{"tensor_parallel_size": 4}],
        pytest.param(
            [
                {"tensor_parallel_size": 4, "enable_expert_parallel": True},
                {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            ],
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["cut in 4", "others"],
)
def test_latents_are_on_every_device_and_heads_are_cut(engines, same_answers, tmp_path, ways):
    model = make_tiny_checkpoint(tmp_path, "deepseek_v3")
    expected, *answers = engines(model, {}, *ways)
    for answer in answers:
        same_answers(answer, expected)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [WAYS, pytest.param(OTHER_WAYS, marks=pytest.mark.sweep)])
def test_any_number_of_devices_gives_the_same_tokens(engines, model, same_answers, ways):
    counted = [way | {"count_expert_tokens": True} for way in ways.values()]
    expected, *answers = engines(model, *counted)
    # Two of three layers have experts.
    assert len(expected["expert_tokens"]) == 2 * 8 and sum(expected["expert_tokens"]) > 0
    for answer in answers:
        same_answers(answer, expected)
        assert answer["expert_tokens"] == expected["expert_tokens"]


@pytest.mark.sweep
def test_eight_devices_have_an_expert_each(engines, same_answers, tmp_path):
    model = make_tiny_checkpoint(
        tmp_path, "qwen3_moe", num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=2
    )
    over_eight = {"tensor_parallel_size": 8, "enable_expert_parallel": True}
    in_stages = {
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 2,
        "enable_expert_parallel": True,
    }
    counted = [way | {"count_expert_tokens": True} for way in ({}, over_eight, in_stages)]
    expected, *answers = engines(model, *counted)
    assert sum(expected["expert_tokens"]) > 0
    for answer in answers:
        same_answers(answer, expected)
        assert answer["expert_tokens"] == expected["expert_tokens"]
