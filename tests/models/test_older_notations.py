"""What families read of configs and checkpoints beside the notation of transformers 5."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.errors import CheckpointError, UnsupportedModelError
from jaxllm.layers.rope import YarnScaling
from jaxllm.models.architecture import read_architecture
from jaxllm.testing import make_tiny_checkpoint, tiny_config
from tests.models.conftest import assert_same_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# As gpt2 was released.
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}


def read(family, **fields):
    """The architecture of a tiny config with these fields; None removes one."""
    config = tiny_config(family) | fields
    return read_architecture({k: v for k, v in config.items() if v is not None})


def attentions(architecture):
    return [attention for layer in architecture.layers for attention in layer.mixers]


def test_gpt2_as_it_was_released():
    architecture = read_architecture(GPT2)
    assert (architecture.hidden_size, architecture.num_layers) == (768, 12)
    assert architecture.max_model_len == architecture.num_positions == 1024
    assert architecture.tie_word_embeddings
    (mlp,) = architecture.layers[0].ffns
    assert mlp.intermediate_size == 4 * 768


def test_gpt2_divides_scores_by_the_number_of_the_layer():
    layers = attentions(read("gpt2", scale_attn_by_inverse_layer_idx=True))
    assert [attention.scale for attention in layers] == [0.25, 0.125]
    layers = attentions(read("gpt2", scale_attn_weights=False))
    assert [attention.scale for attention in layers] == [1.0, 1.0]


def test_a_field_of_another_name_may_have_its_usual_name():
    assert read("gpt2", n_embd=None, hidden_size=128).hidden_size == 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_embd": "64"}, "n_embd='64' must be an integer"),
        ({"n_layer": 10**5}, "n_layer=100000 is too large; at most 4096"),
    ],
)
def test_an_error_says_the_name_that_the_config_has(fields, message):
    with pytest.raises(CheckpointError, match=message):
        read("gpt2", **fields)


def test_olmo3_scales_full_attention_only_in_either_notation():
    nested = {
        "full_attention": YARN | {"rope_theta": 500_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
    }
    new = attentions(read("olmo3", rope_theta=None, rope_parameters=nested))
    old = attentions(read("olmo3", rope_theta=500_000.0, rope_scaling=YARN))
    assert new == old
    assert [isinstance(its.rope.scaling, YarnScaling) for its in old] == [False] * 3 + [True]
    assert [its.window for its in old] == [8, 8, 8, None]


@pytest.mark.parametrize("family", ["mistral3", "mistral4"])
def test_a_scaling_in_the_older_notation_replaces_that_of_the_class(family):
    new = attentions(read(family, rope_parameters=YARN | {"rope_theta": 500.0}))
    old = attentions(read(family, rope_parameters=None, rope_theta=500.0, rope_scaling=YARN))
    assert new == old


def test_the_length_of_gemma3_contains_the_stretch_of_its_rotation():
    architecture = read("gemma3")
    assert architecture.layers[2].rope.scaling.factor == 8.0
    assert architecture.max_model_len == 2048


def test_a_dtype_may_be_there_under_both_names():
    assert read("qwen3", dtype="bfloat16", torch_dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize("kinds", [None, ["sliding_attention", "full_attention"] * 2])
def test_cohere2_rotates_behind_windows_only(kinds):
    layers = attentions(read("cohere2", sliding_window_pattern=2, layer_types=kinds))
    assert [(its.window, its.rope is None) for its in layers] == [(8, False), (None, True)] * 2


def test_cohere2_without_windows_does_not_rotate():
    config = tiny_config("cohere2") | {"sliding_window": None}
    layers = attentions(read_architecture(config | {"layer_types": ["full_attention"] * 4}))
    assert {(its.window, its.rope) for its in layers} == {(None, None)}
    with pytest.raises(CheckpointError, match="sliding_window is not set"):
        read_architecture(config)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("cohere2", "layer_switch", 3),
        ("cohere2", "order_of_interleaved_layers", "global_attn_first"),
        ("cohere2", "position_embedding_type", "alibi"),
        ("cohere2", "use_parallel_block", False),
        ("gemma", "use_bidirectional_attention", True),
        ("gpt2", "add_cross_attention", True),
        ("phi", "tie_word_embeddings", True),
    ],
)
def test_other_designs_are_refused_by_name(family, field, value):
    with pytest.raises(UnsupportedModelError, match=f"{field}|encoder"):
        read(family, **{field: value})


def test_command_r_has_its_length_in_a_field_of_its_own():
    assert read("cohere", model_max_length=131_072).max_model_len == 131_072


def test_neox_rotates_a_quarter_by_default():
    (rope,) = {its.rope for its in attentions(read("gpt_neox", rotary_pct=None))}
    assert (rope.size, rope.theta) == (4, 5000.0)
    new = {"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": 0.5}
    (rope,) = {its.rope for its in attentions(read("gpt_neox", rope_parameters=new))}
    assert (rope.size, rope.theta) == (8, 99.0)


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({"hidden_act": "gelu"}, "gelu_pytorch_tanh"),
        ({"hidden_act": None}, "gelu_pytorch_tanh"),
        ({"hidden_act": "relu"}, "relu"),
        ({"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "relu"}, "relu"),
    ],
)
def test_activation_of_gemma(fields, activation):
    (mlp,) = read("gemma", **fields).layers[0].ffns
    assert mlp.activation == activation


@pytest.mark.parametrize(
    ("family", "rename", "masks"),
    [
        ("gpt2", lambda name: name.removeprefix("transformer."), ["h.0.attn.bias"]),
        ("gpt2", lambda name: name, ["transformer.h.1.attn.masked_bias"]),
        # As transformers saves it.
        ("kimi_linear", lambda name: name.replace("0.mlp.", "0.block_sparse_moe."), []),
        (
            "gpt_neox",
            lambda name: name,
            ["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.masked_bias"],
        ),
    ],
)
def test_older_checkpoints_have_masks_and_other_names(family, rename, masks, tmp_path, single_row):
    model_dir = make_tiny_checkpoint(tmp_path, family)
    new = single_row(model_dir)
    tensors = load_file(model_dir / "model.safetensors")
    old = {rename(name): tensor for name, tensor in tensors.items()}
    old |= {name: np.ones((1, 1, 4, 4), np.float32) for name in masks}
    save_file(old, model_dir / "model.safetensors", metadata={"format": "pt"})
    assert_same_model(single_row(model_dir), new)
