"""A decoder inside a model with towers: read from `text_config`, loaded without the towers."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.layers.attention import AttentionSpec
from jaxllm.testing import make_tiny_checkpoint, tiny_config

PROMPT = np.random.default_rng(0).integers(3, 384, 40).tolist()
# Before and inside the names of the decoder's tensors.
RELEASED = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
BY_TRANSFORMERS = {"model.": "model.language_model."}
# Those of Qwen's releases are as those of the decoder alone, or as transformers writes them.
OF_QWEN = {"model.": "model.", "lm_head.": "lm_head."}
WRAPPED = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "mistral": "Mistral3ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "mistral4": "Mistral3ForConditionalGeneration",
    "mistral-llava": "LlavaForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "qwen2": "Qwen2_5_VLForConditionalGeneration",
    "qwen3": "Qwen3VLForConditionalGeneration",
    "qwen3_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5-moe": "Qwen3_5MoeForConditionalGeneration",
}
# What the decoder's config has only there.
_TURNS = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}
MORE = {
    "qwen2": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
    "qwen3": {"rope_parameters": _TURNS},
    "qwen3_moe": {"rope_parameters": {**_TURNS, "mrope_section": [4, 4, 4]}},
}
GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


def wrap(plain, path, architecture, layout, family=""):
    """Write a checkpoint of the larger model around a plain decoder."""
    path.mkdir()
    config = json.loads((plain / "config.json").read_text()) | MORE.get(family, {})
    outer = {
        "architectures": [architecture],
        "text_config": config,
        "vision_config": {"hidden_size": 32},
        "image_token_index": 250,
        "dtype": config.pop("dtype"),
        "tie_word_embeddings": config.pop("tie_word_embeddings"),
    }
    (path / "config.json").write_text(json.dumps(outer))
    tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        old = next((prefix for prefix in layout if name.startswith(prefix)), "")
        tensors[layout.get(old, "") + name.removeprefix(old)] = tensor
    towers = ("vision_tower.layers.0.weight", "multi_modal_projector.weight")
    for tower in ("visual.blocks.0.weight",) if family in MORE else towers:
        name = layout["model."].partition("language_model")[0] + tower
        tensors[name] = np.ones((2, 3), np.float32)
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("case", WRAPPED)
@pytest.mark.parametrize(
    ("layout", "is_tied"),
    [
        pytest.param(RELEASED, False, id="released"),
        pytest.param(BY_TRANSFORMERS, True, id="transformers-tied"),
        pytest.param(RELEASED, True, id="released-tied", marks=pytest.mark.sweep),
        pytest.param(BY_TRANSFORMERS, False, id="transformers", marks=pytest.mark.sweep),
    ],
)
def test_decoder_is_the_same_without_its_towers(case, layout, is_tied, tmp_path, single_row):
    """But for its name, and for the axes that images turn by."""
    inside, plain = map(single_row, inside_and_plain(case, layout, is_tied, tmp_path))
    architecture = replace(
        inside.architecture,
        name=plain.architecture.name,
        layers=tuple(map(with_one_axis, inside.architecture.layers)),
    )
    assert architecture == plain.architecture
    assert type(inside.abstract_model) is type(plain.abstract_model)
    jax.tree.map(np.testing.assert_array_equal, inside.weights, plain.weights)


def inside_and_plain(case, layout, is_tied, path):
    family, _, variant = case.partition("-")
    config = GOLDEN[f"qwen3.5-{variant}"]["config"] if variant == "moe" else {}
    plain = make_tiny_checkpoint(path / "plain", family, **config, tie_word_embeddings=is_tied)
    layout = OF_QWEN if family in MORE and layout is RELEASED else layout
    return wrap(plain, path / "inside", WRAPPED[case], layout, family), plain


def with_one_axis(layer):
    mixers = (
        replace(mixer, rope=replace(mixer.rope, axes=None))
        if isinstance(mixer, AttentionSpec) and mixer.rope is not None
        else mixer
        for mixer in layer.mixers
    )
    return replace(layer, mixers=tuple(mixers))


@pytest.mark.parametrize("case", ["qwen2", "qwen3"])
def test_text_turns_alike_by_one_axis_and_by_three(case, tmp_path, single_row):
    inside, plain = map(single_row, inside_and_plain(case, RELEASED, False, tmp_path))
    assert inside.architecture.layers != plain.architecture.layers
    np.testing.assert_array_equal(inside.logits(PROMPT), plain.logits(PROMPT))


def test_what_is_left_out_is_logged(tmp_path, single_row, caplog):
    plain = make_tiny_checkpoint(tmp_path / "plain", "mistral3")
    single_row(plain)
    assert "left out" not in caplog.text
    inside = wrap(plain, tmp_path / "inside", WRAPPED["mistral3"], RELEASED)
    single_row(inside)
    (line,) = [message for message in caplog.messages if "left out" in message]
    assert "left out 2 tensors of the checkpoint (0.00 GiB)" in line
    assert "multi_modal_projector.weight, vision_tower.layers.0.weight" in line


@pytest.mark.oracle
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", ["mistral", "ministral3"])
def test_mistral_inside_is_as_in_transformers(kind, is_tied, tmp_path, single_row):
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {
        "model_type": kind, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 8, "head_dim": 24, "vocab_size": 384, "sliding_window": None,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    config = AutoConfig.for_model(
        "mistral3", text_config=text, vision_config=vision, tie_word_embeddings=is_tied
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        expected = model(torch.tensor([PROMPT])).logits[0].numpy()
    model.save_pretrained(tmp_path)
    np.testing.assert_allclose(single_row(tmp_path).logits(PROMPT), expected, atol=2e-4, rtol=0)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "kind", ["qwen3_vl_moe", pytest.param("qwen3_5_moe", marks=pytest.mark.sweep)]
)
def test_experts_of_qwen_inside_are_as_in_transformers(kind, tmp_path, single_row):
    """With tensors as it writes them: the order of their axes is that of releases."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForImageTextToText

    family, name, num_layers = {
        "qwen3_vl_moe": ("qwen3_moe", "qwen3-moe", 2),
        "qwen3_5_moe": ("qwen3_5", "qwen3.5-moe", 4),
    }[kind]
    text = tiny_config(family) | GOLDEN[name]["config"] | {"mlp_only_layers": []}
    text |= {"moe_intermediate_size": 48, "num_hidden_layers": num_layers} | MORE.get(family, {})
    text = {field: value for field, value in text.items() if value is not None}
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
        "num_position_embeddings": 16, "out_hidden_size": 64,
    }  # fmt: skip
    vision |= {"deepstack_visual_indexes": [0]} if kind == "qwen3_vl_moe" else {}
    for field in ("architectures", "model_type", "rope_theta"):
        text.pop(field, None)
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        expected = model(torch.tensor([PROMPT]), use_cache=False).logits[0].numpy()
    model.save_pretrained(tmp_path)
    np.testing.assert_allclose(single_row(tmp_path).logits(PROMPT), expected, atol=5e-4, rtol=0)


@pytest.mark.oracle
def test_what_the_config_leaves_out_is_as_in_transformers(tmp_path, single_row):
    """The config of a decoder inside has only fields that are not defaults of its class."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "sliding_window": 8,
        "head_dim": 24, "vocab_size": 384,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        expected = model(torch.tensor([PROMPT])).logits[0].numpy()
    model.save_pretrained(tmp_path)
    # As a release has it: without what its class has by default.
    written = json.loads((tmp_path / "config.json").read_text())
    written["text_config"] = text
    (tmp_path / "config.json").write_text(json.dumps(written))
    np.testing.assert_allclose(single_row(tmp_path).logits(PROMPT), expected, atol=2e-4, rtol=0)
