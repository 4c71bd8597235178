"""Quantised checkpoints compute what the same models with weights of floats compute."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.errors import CheckpointError, UnsupportedModelError, ValidationError
from jaxllm.files import read_json
from jaxllm.models.architecture import read_architecture
from jaxllm.models.decoder import DecoderForCausalLM
from jaxllm.models.pooling_head import PoolingHeadSpec
from jaxllm.quantization.linear import CodedHead, CodedLinear
from jaxllm.testing import make_tiny_checkpoint, tiny_config
from jaxllm.weights.checkpoint import Checkpoint
from tests.models.conftest import SingleRow
from tests.quantization.checkpoints import FLOAT8, INT8, compressed, write_both, write_format
from tests.quantization.formats import FORMATS, pack_quantized

PROMPT = [5, 77, 201, 9, 300, 41, 8, 123, 64, 250, 17]
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS = {"weight_block_size": [24, 32], "modules_to_not_convert": ["lm_head"]}
# Config, type of the codes, block; then how the scales are stored.
EIGHT_BITS = {
    "int8-channel": (compressed("int", "channel"), INT8, (1, None), {}),
    "fp8-channel": (compressed("float", "channel"), FLOAT8, (1, None), {}),
    "fp8-tensor": (compressed("float", "tensor"), FLOAT8, (None, None), {"scale_shape": (1,)}),
    "fp8-block": (
        compressed("float", "block", block_structure=[24, 32]), FLOAT8, (24, 32), {}
    ),
    "fp8-old": (FP8, FLOAT8, (None, None), {"scale_shape": ()}),
    "fp8-deepseek": (FP8 | BLOCKS, FLOAT8, (24, 32), {"scale_name": "weight_scale_inv"}),
}  # fmt: skip


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_logits_are_those_of_the_weights_that_codes_stand_for(name, tmp_path):
    config, dtype, block, stored = EIGHT_BITS[name]
    coded, plain = write_both(tmp_path, config, dtype, block, **stored)
    model = SingleRow(coded)
    assert isinstance(model.abstract_model.model.layers[1].self_attn.qkv_proj, CodedLinear)
    assert model.weights["model"]["layers"][0]["mlp"]["down_proj"]["weight"].dtype == dtype
    expected = SingleRow(plain).logits(PROMPT)
    np.testing.assert_allclose(model.logits(PROMPT), expected, atol=1e-4, rtol=0)


# Tensors that are fused in the checkpoint, pairs that are rotated, biases, no gate; rows that are
# in groups of heads.
@pytest.mark.parametrize("family", ["phi3", "glm", "qwen2", "starcoder2", "gpt_neox", "qwen3_next"])
@pytest.mark.parametrize("name", ["int8-channel", "fp8-deepseek"])
def test_every_way_to_find_a_weight_finds_its_scales(name, family, tmp_path):
    config, dtype, block, stored = EIGHT_BITS[name]
    coded, plain = write_both(tmp_path, config, dtype, block, family=family, **stored)
    expected = SingleRow(plain).logits(PROMPT)
    np.testing.assert_allclose(SingleRow(coded).logits(PROMPT), expected, atol=1e-4, rtol=0)


def test_groups_that_cannot_be_cut_are_refused(tmp_path):
    fields = {"hidden_size": 60, "num_attention_heads": 6, "head_dim": 10}
    fields |= {"num_key_value_heads": 6, "quantization_config": FP8 | BLOCKS}
    fields["quantization_config"] |= {"weight_block_size": [24, 60]}
    config = tiny_config("llama") | {"dtype": "float32"} | fields
    architecture = read_architecture(config)
    with pytest.raises(ValidationError, match="=2: the 128 inputs of .*down_proj"):
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
        ({"quant_method": "quip"}, "'?quip.* is not supported; supported are compressed-tensors"),
        (FP8 | {"fmt": "e5m2"}, "fmt='e5m2' is not supported"),
        (FP8 | {"weight_block_size": [0, 128]}, "weight_block_size=.* must be two sizes"),
        (FP8 | {"hadamard": True}, "hadamard is not supported"),
        (compressed("int", "channel", num_bits=4), "num_bits=4 is not supported"),
        (compressed("int", "group", group_size=0), "group_size=0 is no size"),
        (FORMATS["packed-4-groups"].config | {"format": "marlin-24"}, "format='marlin-24'"),
        (FORMATS["awq"].config | {"version": "gemv"}, "version='gemv' is not supported"),
        (FORMATS["awq"].config | {"zero_point": False}, "zero_point=False is not supported"),
        (FORMATS["gptq"].config | {"bits": 3}, "bits=3 is not supported"),
        (FORMATS["gptq"].config | {"dynamic": {"-:x": {}}}, "dynamic=.* stores some layers in"),
        (FORMATS["modelopt-fp8"].config | {"quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ'"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "load_in_4bit=True is not supported: .* quantization='int4'",
        ),
        (compressed("int", "channel", symmetric=False), "symmetric=False is not supported"),
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
        (None, "awq", "quantization='awq': .* can be read as int8, fp8 or int4"),
        (FP8, "int8", "quantization='int8': the checkpoint is quantised with fp8"),
    ],
)
def test_what_is_asked_fits_the_checkpoint(config, asked, error, tmp_path):
    fields = read_json(make_tiny_checkpoint(tmp_path) / "config.json")
    with pytest.raises(ValidationError, match=error):
        read_architecture(fields | {"quantization_config": config}, quantization=asked)


@pytest.mark.parametrize(
    "name", ["packed-4-groups-zeros", "mxfp4", "nvfp4", "awq", "gptq", "bitsandbytes-8"]
)
def test_logits_of_codes_in_other_formats(name, tmp_path):
    coded, plain = write_format(tmp_path, FORMATS[name])
    expected = SingleRow(plain).logits(PROMPT)
    np.testing.assert_allclose(SingleRow(coded).logits(PROMPT), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["modelopt-fp8", "modelopt-nvfp4"])
def test_codes_may_be_described_beside_the_config(name, tmp_path):
    coded, plain = write_format(tmp_path, FORMATS[name])
    config = read_json(coded / "config.json")
    fields = config.pop("quantization_config")
    (coded / "config.json").write_text(json.dumps(config))
    # As ModelOpt writes it.
    described = {
        "producer": {"name": "modelopt", "version": "0.15.1"},
        "quantization": {
            "quant_algo": fields["quant_algo"],
            "kv_cache_quant_algo": None,
            "exclude_modules": ["lm_head"],
        },
    }
    (coded / "hf_quant_config.json").write_text(json.dumps(described))
    expected = SingleRow(plain).logits(PROMPT)
    np.testing.assert_allclose(SingleRow(coded).logits(PROMPT), expected, atol=1e-4, rtol=0)
    (coded / "hf_quant_config.json").write_text('{"quantization": "FP8"}')
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json: quantization='FP8' must be"):
        SingleRow(coded)


def test_int4_is_made_in_groups_that_divide_the_inputs(tmp_path):
    sizes = {"hidden_size": 80, "num_attention_heads": 4, "head_dim": 24, "intermediate_size": 256}
    make_tiny_checkpoint(tmp_path, "qwen3", **sizes)
    model = SingleRow(tmp_path, quantization="int4")
    layer = model.abstract_model.model.layers[0]
    groups = [
        module.form.group
        for module in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.down_proj)
    ]
    assert groups == [80, 96, 128]
    assert layer.mlp.down_proj.weight_scale.dtype == ml_dtypes.bfloat16
    assert np.isfinite(model.logits(PROMPT)).all()


def test_a_head_may_have_codes(tmp_path):
    form = pack_quantized(4, 32)
    form.config["ignore"].remove("lm_head")
    coded, plain = write_format(tmp_path, form, also=("lm_head",), vocab_size=200)
    model = SingleRow(coded)
    assert isinstance(model.abstract_model.lm_head, CodedHead)
    prompt = [token % 200 for token in PROMPT]
    expected = SingleRow(plain).logits(prompt)
    np.testing.assert_allclose(model.logits(prompt), expected, atol=1e-4, rtol=0)
    scores = PoolingHeadSpec(tokens=(1, 2))
    reranker = dataclasses.replace(model.architecture, pooling_head=scores)
    with pytest.raises(UnsupportedModelError, match="lm_head is stored as codes"):
        DecoderForCausalLM.abstract(reranker, np.float32)


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
