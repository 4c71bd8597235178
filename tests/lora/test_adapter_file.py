"""An adapter's files: what they say is what is computed, and the rest is refused by name."""

import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxllm import CheckpointError, ValidationError
from jaxllm.lora.adapter_config import AdapterConfig
from jaxllm.lora.adapter_file import content_of, read_adapter
from jaxllm.lora.request import AdapterLimits
from tests.adapters import DOWN, LIMITS, Q, write


def scales(path):
    """The scale of each layer, by which B was multiplied."""
    adapter = read_adapter(path, LIMITS)
    given = load_file(path / "adapter_model.safetensors")
    return {
        layer: float(its.b[0, 0] / given[f"base_model.model.{layer}.lora_B.weight"][0, 0])
        for layer, its in adapter.items()
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {Q: 3, DOWN: 3}),
        ({"use_rslora": True}, {Q: 6 / 2**0.5, DOWN: 6 / 2**0.5}),
        ({"alpha_pattern": {"q_proj": 2, ".*": 4}}, {Q: 1, DOWN: 2}),
        ({"alpha_pattern": {"j": 2, "layers.1.mlp.down_proj": 1}}, {Q: 3, DOWN: 0.5}),
        ({"r": 4, "rank_pattern": {r".*\.(0|1)\..*": 2}}, {Q: 3, DOWN: 3}),
        ({"lora_alpha": None}, {Q: 4, DOWN: 4}),
        ({"lora_dropout": 0.1, "bias": "lora_only", "layers_to_transform": [0]}, {Q: 3, DOWN: 3}),
    ],
)
def test_matrices_have_the_scale_that_the_config_says(tmp_path, config, expected):
    assert scales(write(tmp_path, config)) == pytest.approx(expected)


def test_matrices_of_16_bits_take_the_scale_in_32(tmp_path):
    path = write(tmp_path, {"lora_alpha": 1}, dtype=ml_dtypes.bfloat16)
    limits = AdapterLimits(1, 8, "bfloat16", LIMITS.layers)
    given = load_file(path / "adapter_model.safetensors")[f"base_model.model.{Q}.lora_B.weight"]
    its = read_adapter(path, limits)[Q]
    assert its.a.dtype == its.b.dtype == ml_dtypes.bfloat16
    assert np.array_equal(its.b, (given.astype(np.float32) / 2).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3': only 'LORA'"),
        ({"use_dora": True}, "use_dora=True: the norms of DoRA"),
        ({"lora_bias": True}, "lora_bias=True: .*biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.*whole modules"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices=.*new embeddings"),
        ({"target_parameters": ["experts.w"]}, "target_parameters=.*experts"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4': it changes"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq': it changes"),
        ({"layer_replication": [[0, 1]]}, "layer_replication="),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens="),
        ({"use_qalora": True}, "use_qalora="),
        ({"use_bdlora": True}, "use_bdlora="),
        ({"some_new_field": 1}, "some_new_field=1: this field"),
        ({"r": 0}, "r=0: it must be an integer"),
        ({"r": 9}, "r=9: .*max_lora_rank=8"),
        ({"lora_alpha": "x"}, "lora_alpha='x': it must be a number"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern='\\(': it is no regular expression"),
        ({"rank_pattern": {"q_proj": 3}}, "lora_A is .*with rank 3"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_field(tmp_path, config, reason):
    with pytest.raises(ValidationError, match=reason) as caught:
        read_adapter(write(tmp_path, config), LIMITS)
    assert str(tmp_path) in str(caught.value)


A, B = (f"base_model.model.{Q}.lora_{side}.weight" for side in "AB")


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({f"base_model.model.{Q}.lora_magnitude_vector": np.ones(4)}, "the norms of DoRA"),
        ({"base_model.model.lm_head.base_layer.weight": np.ones((2, 2))}, "weights of the base"),
        ({"base_model.model.e.lora_embedding_A": np.ones((2, 2))}, "adapters of embeddings"),
        ({f"base_model.model.{Q}.lora_B.bias": np.ones(4)}, "adapters with biases"),
        ({"base_model.model.experts.0.up.lora_A.weight": np.ones((2, 2))}, "adapters of experts"),
        ({"model.stray.weight": np.ones(2)}, "tensor model.stray.weight is none of LoRA's"),
        ({B: None}, "q_proj has no lora_B"),
        ({B: np.ones((4, 3))}, r"lora_B \[4, 3\]; with rank 2.*\[4, 2\]"),
        ({A: np.ones((2, 7))}, r"lora_A is \[2, 7\].*\[2, 6\]"),
        ({A: np.full((2, 6), np.nan)}, "lora_A has values that float32 does not have, or NaN"),
        (
            {A.replace("q_", "x_"): np.ones((2, 6)), B.replace("q_", "x_"): np.ones((4, 2))},
            "x_proj: the model has no such linear layer.* down_proj, q_proj",
        ),
        (
            {f"base_model.model.lm_head.lora_{side}.weight": np.ones((2, 2)) for side in "AB"},
            "lm_head: adapters of embeddings and heads",
        ),
    ],
)
def test_every_tensor_has_a_place_or_is_refused_by_name(tmp_path, tensors, reason):
    with pytest.raises((ValidationError, CheckpointError), match=reason):
        read_adapter(write(tmp_path, tensors=tensors), LIMITS)


def test_pickles_are_not_read(tmp_path):
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="a pickle"):
        read_adapter(tmp_path, LIMITS)


def test_content_is_that_of_both_files(tmp_path):
    before = content_of(write(tmp_path))
    assert content_of(write(tmp_path)) == before
    assert content_of(write(tmp_path, {"lora_alpha": 7})) != before
    assert content_of(write(tmp_path, tensors={A: np.ones((2, 6))})) != before


def test_patterns_match_the_end_of_a_name_from_a_dot_on(tmp_path):
    config = AdapterConfig.read(
        write(tmp_path, {"rank_pattern": {"proj": 1, "self_attn.q_proj": 5}})
    )
    assert config.rank_of(Q) == 5
    assert config.rank_of(DOWN) == 2
    assert re.search("q_proj$", Q)
