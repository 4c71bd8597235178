"""A cache of codes that is cut over devices has the codes that one device has."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.testing import make_tiny_checkpoint
from tests.profile import SHARDED_MODEL

INT8 = {"kv_cache_dtype": "int8"}  # with calculated scales
VARIANTS = {
    "int8": INT8,
    "int8 in stages": INT8 | {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "fp8": {"kv_cache_dtype": "fp8"},
    # Each kv head has four copies.
    "fp8 on eight": {"kv_cache_dtype": "fp8", "tensor_parallel_size": 8},
}


@pytest.fixture(scope="module")
def answered(engines, tmp_path_factory):
    """What each of these engines answers. The checkpoint has scales for fp8, one for each head."""
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("model"), **SHARDED_MODEL)
    tensors = load_file(model / "model.safetensors")
    for layer in range(SHARDED_MODEL["num_hidden_layers"]):
        for index, name in enumerate(("k_scale", "v_scale")):
            scales = [0.01 * (1 + layer + index), 0.02 * (1 + layer + index)]
            stored = np.array(scales, np.float32).reshape(-1, 1, 1)
            tensors[f"model.layers.{layer}.self_attn.{name}"] = stored
    save_file(tensors, model / "model.safetensors")
    assert "quantization_config" not in json.loads((model / "config.json").read_text())
    return dict(zip(VARIANTS, engines(model, *VARIANTS.values()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if " " in name])
def test_devices_have_their_share_of_codes_and_scales(answered, same_answers, name):
    same_answers(answered[name], answered[name.split()[0]])


@pytest.mark.slow
def test_codes_of_different_types_are_different(answered):
    logprobs = [answered[name]["answers"][0]["logprobs"] for name in ("int8", "fp8")]
    assert logprobs[0] != logprobs[1]
