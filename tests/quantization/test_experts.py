"""Experts whose matrices are codes, in models of one row."""

import json

import numpy as np
import pytest
from flax import nnx
from jaxllm_kernels.coded import CodedWeight, values
from jaxllm_kernels.dense.xla import XlaCodedMatmul
from jaxllm_kernels.experts.xla import XlaExperts
from safetensors.numpy import load_file, save_file

from jaxllm.errors import CheckpointError, UnsupportedModelError
from jaxllm.files import read_json
from jaxllm.layers.moe import Experts
from jaxllm.quantization.linear import CodedExperts
from jaxllm.quantization.products import Products
from jaxllm.testing import make_tiny_checkpoint
from tests.models.conftest import SingleRow
from tests.quantization.checkpoints import FLOAT8, compressed, write_format
from tests.quantization.formats import E2M1, FORMATS, pack_quantized

PROMPT = [5, 77, 201, 9, 300, 41, 8, 123, 64, 250, 17]


# A latent whose matrix is held as heads' parts, names w1, w2 and w3, shared experts, a gate beside.
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("deepseek_v3", "fp8-ragged-blocks"),
        ("mixtral", "packed-4-groups-zeros"),
        ("minimax_m2", "fp8-blocks"),
        ("qwen2_moe", "packed-8-channels"),
    ],
)
def test_experts_with_codes(family, name, tmp_path):
    form = FORMATS[name]
    if family == "mixtral":
        form = pack_quantized(4, 16, symmetric=False)
    coded, plain = write_format(tmp_path, form, family)
    model = SingleRow(coded)
    experts = [m for _, m in nnx.iter_graph(model.abstract_model) if isinstance(m, Experts)]
    assert experts and all(isinstance(module, CodedExperts) for module in experts)
    expected = SingleRow(plain).logits(PROMPT)
    np.testing.assert_allclose(model.logits(PROMPT), expected, atol=1e-4, rtol=0)


def write_gpt_oss(path, **fields):
    """As released, and in floats."""
    sizes = {"hidden_size": 64, "intermediate_size": 96} | fields
    coded = make_tiny_checkpoint(path / "coded", "gpt_oss", **sizes)
    plain = make_tiny_checkpoint(path / "plain", "gpt_oss", **sizes)
    tensors = load_file(plain / "model.safetensors")
    stored, random = dict(tensors), np.random.default_rng(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        numbers = random.integers(0, 16, (experts, outputs, inputs), np.uint8)
        exponents = random.integers(120, 124, (experts, outputs, inputs // 32), np.uint8)
        blocks = (numbers[..., ::2] | numbers[..., 1::2] << 4).reshape(*exponents.shape, 16)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        scales = np.repeat(2.0 ** (exponents.astype(np.float32) - 127), 32, axis=-1)
        values = (E2M1[numbers] * scales).astype(np.float32)
        tensors[name] = np.ascontiguousarray(values.swapaxes(1, 2))
    save_file(stored, coded / "model.safetensors")
    save_file(tensors, plain / "model.safetensors")
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": [*left_out, "lm_head"]}
    described = read_json(coded / "config.json") | {"quantization_config": config}
    (coded / "config.json").write_text(json.dumps(described))
    return coded, plain


@pytest.mark.parametrize("by_output", [False, True])
def test_gpt_oss_as_released(by_output, tmp_path):
    coded, plain = write_gpt_oss(tmp_path)
    op = XlaExperts(coded=XlaCodedMatmul(mx_by_output=by_output))
    model = SingleRow(coded, products=Products(experts=(op,)))
    weight = model.weights["model"]["layers"][0]["mlp"]["experts"]["w13_weight"]
    assert weight.dtype == (FLOAT8 if by_output else np.uint8)
    expected = SingleRow(plain).logits(PROMPT)
    np.testing.assert_allclose(model.logits(PROMPT), expected, atol=1e-4, rtol=0)


def test_experts_in_one_tensor_are_refused_in_other_formats(tmp_path):
    coded, _ = write_gpt_oss(tmp_path)
    config = read_json(coded / "config.json")
    config["quantization_config"] = compressed("int", "channel")
    (coded / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="experts.gate_up_proj has all experts in one"):
        SingleRow(coded)


@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_codes_of_experts_are_made_of_weights_that_are_read(family, method, tmp_path):
    model = SingleRow(make_tiny_checkpoint(tmp_path, family), quantization=method)
    plain = SingleRow(tmp_path)
    for layer in (0, 1):
        module = model.abstract_model.model.layers[layer].mlp.experts
        state = model.weights["model"]["layers"][layer]["mlp"]["experts"]
        floats = plain.weights["model"]["layers"][layer]["mlp"]["experts"]
        for leaf, form in zip(("w13_weight", "w2_weight"), module.forms, strict=True):
            codes, scales = state[leaf][...], state[f"{leaf}_scale"][...]
            weight = CodedWeight(codes=codes, scales=scales, form=form)
            expected = np.asarray(floats[leaf][...])
            scales_of = np.asarray(scales, np.float32)
            steps = np.repeat(scales_of, form.group or expected.shape[-1], axis=-1)
            # Half a step; scales of int4 are rounded, by which the largest weights are off.
            assert (abs(np.asarray(values(weight)) - expected) <= 0.53 * steps).all()
    assert np.isfinite(model.logits(PROMPT)).all()


def test_a_router_with_codes_is_refused_by_name(tmp_path):
    form = pack_quantized(4, 16)
    form.config["ignore"].remove("re:.*mlp.gate$")
    coded, _ = write_format(tmp_path, form, "qwen3_moe", also=("mlp.gate.",))
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.gate"):
        SingleRow(coded)
