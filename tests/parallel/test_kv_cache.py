"""A cache of codes that is cut over devices has the codes that one device has."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.testing import make_tiny_checkpoint
from tests.profile import SHARDED_MODEL

# Two rows, and so one shape of decodes.
TWO = {"max_num_seqs": 2}
INT8 = TWO | {"kv_cache_dtype": "int8"}  # with calculated scales
FP8 = TWO | {"kv_cache_dtype": "fp8"}
MODEL = SHARDED_MODEL | {"num_hidden_layers": 2}
VARIANTS = {
    "int8": INT8,
    "int8 in stages": INT8 | {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "fp8": FP8,
    # Each kv head has four copies.
    "fp8 on eight": FP8 | {"tensor_parallel_size": 8},
}


@pytest.fixture(scope="module")
def answered(engines, tmp_path_factory):
    """What each of these engines answers. The checkpoint has scales for fp8, one for each head."""
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("model"), **MODEL)
    tensors = load_file(model / "model.safetensors")
    for layer in range(MODEL["num_hidden_layers"]):
        for index, name in enumerate(("k_scale", "v_scale")):
            scales = [0.01 * (1 + layer + index), 0.02 * (1 + layer + index)]
            stored = np.array(scales, np.float32).reshape(-1, 1, 1)
            tensors[f"model.layers.{layer}.self_attn.{name}"] = stored
    save_file(tensors, model / "model.safetensors")
    assert "quantization_config" not in json.loads((model / "config.json").read_text())
    return dict(zip(VARIANTS, engines(model, *VARIANTS.values()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if " " in name])
def test_devices_have_their_share_of_codes_and_scales(answered, name):
    """Sums over devices differ in the last bit, so a key at the border of two codes may get the
    other one."""
    pairs = zip(answered[name]["answers"], answered[name.split()[0]]["answers"], strict=True)
    for ours, expected in pairs:
        assert ours["tokens"] == expected["tokens"]
        np.testing.assert_allclose(ours["logprobs"], expected["logprobs"], atol=5e-3)


@pytest.mark.slow
def test_codes_of_different_types_are_different(answered):
    logprobs = [answered[name]["answers"][0]["logprobs"] for name in ("int8", "fp8")]
    assert logprobs[0] != logprobs[1]
