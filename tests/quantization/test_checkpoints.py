"""Quantised checkpoints compute what the same models with weights of floats compute."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.errors import CheckpointError, UnsupportedModelError, ValidationError
from jaxllm.files import read_json
from jaxllm.models.architecture import read_architecture
from jaxllm.models.decoder import DecoderForCausalLM
from jaxllm.quantization.linear import CodedLinear
from jaxllm.testing import make_tiny_checkpoint, tiny_config
from jaxllm.weights.checkpoint import Checkpoint
from tests.models.conftest import SingleRow
from tests.quantization.checkpoints import FLOAT8, INT8, compressed, write_both

PROMPT = [5, 77, 201, 9, 300, 41, 8, 123, 64, 250, 17]
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS = {"weight_block_size": [24, 32], "modules_to_not_convert": ["lm_head"]}
# Config, type of the codes, block; then how the scales are stored.
FORMATS = {
    "int8-channel": (compressed("int", "channel"), INT8, (1, None), {}),
    "fp8-channel": (compressed("float", "channel"), FLOAT8, (1, None), {}),
    "fp8-tensor": (compressed("float", "tensor"), FLOAT8, (None, None), {"scale_shape": (1,)}),
    "fp8-block": (
        compressed("float", "block", block_structure=[24, 32]), FLOAT8, (24, 32), {}
    ),
    "fp8-old": (FP8, FLOAT8, (None, None), {"scale_shape": ()}),
    "fp8-deepseek": (FP8 | BLOCKS, FLOAT8, (24, 32), {"scale_name": "weight_scale_inv"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_weights_that_codes_stand_for(name, tmp_path):
    config, dtype, block, stored = FORMATS[name]
    coded, plain = write_both(tmp_path, config, dtype, block, **stored)
    model = SingleRow(coded)
    assert isinstance(model.abstract_model.model.layers[1].self_attn.qkv_proj, CodedLinear)
    assert model.weights["model"]["layers"][0]["mlp"]["down_proj"]["weight"].dtype == dtype
    expected = SingleRow(plain).logits(PROMPT)
    np.testing.assert_allclose(model.logits(PROMPT), expected, atol=1e-4, rtol=0)


# Tensors that are fused in the checkpoint, pairs that are rotated, biases, no gate.
@pytest.mark.parametrize("family", ["phi3", "glm", "qwen2", "starcoder2"])
@pytest.mark.parametrize("name", ["int8-channel", "fp8-deepseek"])
def test_every_way_to_find_a_weight_finds_its_scales(name, family, tmp_path):
    config, dtype, block, stored = FORMATS[name]
    coded, plain = write_both(tmp_path, config, dtype, block, family=family, **stored)
    expected = SingleRow(plain).logits(PROMPT)
    np.testing.assert_allclose(SingleRow(coded).logits(PROMPT), expected, atol=1e-4, rtol=0)


def test_groups_that_devices_would_share_are_refused(tmp_path):
    coded, _ = write_both(
        tmp_path, FP8 | {"weight_block_size": [64, 64]}, FLOAT8, (64, 64),
        scale_name="weight_scale_inv",
    )  # fmt: skip
    architecture = read_architecture(read_json(coded / "config.json"))
    with pytest.raises(ValidationError, match="tensor_parallel_size=2: the 64 inputs of .*o_proj"):
        DecoderForCausalLM.abstract(architecture, "float32", num_shards=2)


def test_layers_that_are_left_out_keep_their_weights(tmp_path):
    config = compressed("int", "channel") | {"ignore": ["lm_head", r"re:.*layers\.0\.mlp.*"]}
    coded, plain = write_both(tmp_path, config, INT8, (1, None), ignored=("layers.0.mlp",))
    model = SingleRow(coded)
    first, second = model.abstract_model.model.layers
    assert not isinstance(first.mlp.down_proj, CodedLinear)
    assert isinstance(second.mlp.down_proj, CodedLinear)
    expected = SingleRow(plain).logits(PROMPT)
    np.testing.assert_allclose(model.logits(PROMPT), expected, atol=1e-4, rtol=0)


def test_scales_of_rows_and_of_the_cache_are_left_out(tmp_path):
    name = "model.layers.0.self_attn.{}"
    unused = {
        name.format(its): np.ones(1, np.float32)
        for its in ("q_proj.input_scale", "k_scale", "v_scale")
    }
    config = FP8 | {"activation_scheme": "static"}
    coded, plain = write_both(
        tmp_path, config, FLOAT8, (None, None), scale_shape=(1,), extra=unused
    )
    expected = SingleRow(plain).logits(PROMPT)
    np.testing.assert_allclose(SingleRow(coded).logits(PROMPT), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("method", "dtype"), [("int8", INT8), ("fp8", FLOAT8)])
def test_codes_are_made_of_weights_that_are_read(method, dtype, tmp_path):
    config = compressed("int" if dtype == INT8 else "float", "channel")
    coded, _ = write_both(tmp_path, config, dtype, (1, None))
    made = SingleRow(make_tiny_checkpoint(tmp_path / "read"), quantization=method)
    read = SingleRow(coded)
    np.testing.assert_array_equal(made.logits(PROMPT), read.logits(PROMPT))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"quant_method": "awq"}, "'?awq.* is not supported; supported are compressed-tensors"),
        (FP8 | {"fmt": "e5m2"}, "fmt='e5m2' is not supported"),
        (FP8 | {"weight_block_size": [0, 128]}, "weight_block_size=.* must be two sizes"),
        (FP8 | {"hadamard": True}, "hadamard is not supported"),
        (compressed("int", "channel", num_bits=4), "num_bits=4 is not supported"),
        (compressed("int", "channel", symmetric=False), "symmetric=False is not supported"),
        (compressed("int", "group", group_size=64), "strategy='group' is not supported"),
        (compressed("int", "channel") | {"format": "pack-quantized"}, "format='pack-quantized'"),
        (compressed("int", "channel") | {"ignore": ["re:("]}, "pattern '\\('"),
        (compressed("int", "channel") | {"sparsity_config": {"format": "x"}}, "sparsity_config"),
        (compressed("int", "channel") | {"config_groups": {}}, "config_groups={} is no object"),
        ("fp8", "quantization_config='fp8' must be an object"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields, error, tmp_path):
    config = read_json(make_tiny_checkpoint(tmp_path) / "config.json")
    with pytest.raises((UnsupportedModelError, CheckpointError), match=error):
        read_architecture(config | {"quantization_config": fields})


@pytest.mark.parametrize(
    ("config", "asked", "error"),
    [
        (None, "awq", "quantization='awq': .* can be read as int8 or fp8"),
        (FP8, "int8", "quantization='int8': the checkpoint is quantised with fp8"),
    ],
)
def test_what_is_asked_fits_the_checkpoint(config, asked, error, tmp_path):
    fields = read_json(make_tiny_checkpoint(tmp_path) / "config.json")
    with pytest.raises(ValidationError, match=error):
        read_architecture(fields | {"quantization_config": config}, quantization=asked)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_experts_with_codes_are_refused_unless_they_are_left_out(family):
    def abstract(config):
        fields = tiny_config(family) | {"dtype": "float32", "quantization_config": config}
        return DecoderForCausalLM.abstract(read_architecture(fields), "float32")

    with pytest.raises(UnsupportedModelError, match="'fp8' is not supported for a model with ex"):
        abstract(FP8)
    model = abstract(compressed("int", "channel") | {"ignore": [r"re:.*experts.*"]})
    assert isinstance(model.model.layers[1].self_attn.o_proj, CodedLinear)


def test_pieces_of_one_matrix_have_one_form(tmp_path):
    config = compressed("int", "channel") | {"ignore": [r"re:.*q_proj"]}
    coded, _ = write_both(tmp_path, config, INT8, (1, None), ignored=("q_proj",))
    with pytest.raises(UnsupportedModelError, match="q_proj.* in different forms"):
        SingleRow(coded)


@pytest.mark.parametrize(
    ("is_coded", "says", "error"),
    [
        (True, None, "is stored as I8; config.json asks for F32"),
        (False, compressed("int", "channel"), "is stored as F32; config.json asks for I8"),
        (True, compressed("float", "channel"), "is stored as I8; config.json asks for F8_E4M3"),
    ],
)  # fmt: skip
def test_codes_are_not_taken_for_weights(is_coded, says, error, tmp_path):
    coded, plain = write_both(tmp_path, compressed("int", "channel"), INT8, (1, None))
    path = coded if is_coded else plain
    config = read_json(path / "config.json") | {"quantization_config": says}
    tensors = load_file(path / "model.safetensors")
    if is_coded and says is None:
        tensors = {name: its for name, its in tensors.items() if not name.endswith("_scale")}
    if not is_coded:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            scales = np.ones((len(tensors[name]), 1), np.float32)
            tensors[name.replace(".weight", ".weight_scale")] = scales
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=error):
        SingleRow(path)


def test_codes_of_nan_are_refused(tmp_path):
    coded, _ = write_both(tmp_path, FP8, FLOAT8, (None, None), scale_shape=(1,))
    name = "model.layers.1.mlp.up_proj.weight"
    with Checkpoint(coded) as checkpoint:
        place = checkpoint.tensors[name]
    with place.file.open("r+b") as file:
        file.seek(place.offset + 70)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match=f"{name} has codes of NaN"):
        SingleRow(coded)
