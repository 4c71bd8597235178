"""Heads that draft: which tensors of a checkpoint they are, and what the parts around their layer
compute. What a whole head guesses is in tests/engine/test_draft_heads.py."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxllm.errors import CheckpointError, UnsupportedModelError
from jaxllm.models.architecture import read_architecture
from jaxllm.models.draft_head import TokenMap
from jaxllm.models.read_eagle import read_eagle
from jaxllm.models.registry import ModelRegistry
from jaxllm.testing import make_tiny_checkpoint, tiny_config
from jaxllm.weights.loader import load_weights
from tests.heads import add_mtp

LLAMA = tiny_config("llama") | {"dtype": "float32", "num_hidden_layers": 4}
TARGET = read_architecture(LLAMA)
HEAD = LLAMA | {"num_hidden_layers": 1}


def read(method="eagle3", **fields):
    return read_eagle(method, HEAD | fields, TARGET, max_model_len=64)


def head_of(model):
    architecture = read_architecture(json.loads((model / "config.json").read_text()))
    return ModelRegistry.family(architecture.name).draft_head(architecture)


@pytest.mark.parametrize(
    ("family", "begin", "names"),
    [
        (
            "deepseek_v3",
            "model.layers.2.",
            {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight",
             "self_attn.kv_a_proj_with_mqa.weight", "mlp.experts.7.up_proj.weight",
             "mlp.shared_experts.up_proj.weight", "mlp.gate.e_score_correction_bias"},
        ),
        (
            "glm4_moe",
            "model.layers.3.",
            {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight",
             "self_attn.q_norm.weight", "self_attn.k_proj.bias", "mlp.experts.0.gate_proj.weight"},
        ),
        (
            "mimo_v2",
            "model.mtp.layers.0.",
            {"enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight",
             "self_attn.attention_sink_bias", "pre_mlp_layernorm.weight", "mlp.up_proj.weight"},
        ),
    ],
)  # fmt: skip
def test_a_checkpoint_has_its_head_under_these_names(family, begin, names, tmp_path):
    model = make_tiny_checkpoint(tmp_path, family, num_nextn_predict_layers=1)
    tensors = add_mtp(model)
    assert all(name.startswith(begin) for name in tensors)
    assert names <= {name.removeprefix(begin) for name in tensors}
    assert not any("post_attention" in name for name in tensors) or family != "mimo_v2"
    # The head is loaded of a file that has the decoder, too, and the decoder leaves it out.
    load_weights(model, head_of(model).abstract(np.float32, 1))
    architecture = read_architecture(json.loads((model / "config.json").read_text()))
    decoder = ModelRegistry.resolve([architecture.name]).abstract(architecture, np.float32)
    load_weights(model, decoder)


def test_what_a_head_shares_with_the_model_must_be_the_same(tmp_path):
    model = make_tiny_checkpoint(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    add_mtp(model)
    file, at = model / "model.safetensors", "model.layers.2"
    tensors = load_file(file)
    shared = {
        f"{at}.embed_tokens.weight": tensors["model.embed_tokens.weight"],
        f"{at}.shared_head.head.weight": tensors["lm_head.weight"],
    }
    save_file(tensors | shared, file)
    load_weights(model, head_of(model).abstract(np.float32, 1))
    shared[f"{at}.shared_head.head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors | shared, file)
    with pytest.raises(CheckpointError, match=r"shared_head.head.weight to lm_head.weight"):
        load_weights(model, head_of(model).abstract(np.float32, 1))


@pytest.mark.parametrize("family", ["glm4_moe", "mimo_v2"])
def test_both_inputs_are_normed_and_joined(family, tmp_path):
    """With a layer that passes its input on."""
    model = make_tiny_checkpoint(tmp_path, family, num_nextn_predict_layers=1)
    tensors = add_mtp(model)
    spec = head_of(model)
    state = load_weights(model, abstract := spec.abstract(np.float32, 1))
    head = nnx.merge(nnx.split(abstract)[0], state)
    head.layer = lambda x, caches, context: (x, caches)
    rng = np.random.default_rng(0)
    embedded, hidden = rng.standard_normal((2, 5, 64)).astype(np.float32)

    def norm(x, name):
        [weight] = [value for key, value in tensors.items() if key.endswith(f"{name}.weight")]
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + spec.norm.eps) * weight

    [project] = [value for key, value in tensors.items() if "eh_proj" in key]
    both = np.concatenate([norm(embedded, "enorm"), norm(hidden, "hnorm")], axis=1) @ project.T
    last = {"glm4_moe": "shared_head.norm", "mimo_v2": "final_layernorm"}[family]
    given, _ = head(embedded, hidden, (), None)
    # DeepSeek and GLM go on from before the last norm, MiMo from behind it.
    goes_on = norm(both, last) if family == "mimo_v2" else both
    np.testing.assert_allclose(given, goes_on, atol=1e-5)
    logits = head.compute_logits(given, lambda x: x)
    np.testing.assert_allclose(logits, norm(both, last), atol=1e-5)


def test_a_draft_vocabulary_is_spread_over_the_models():
    tokens = TokenMap(3)
    tokens.offsets = nnx.Param(jnp.array([1, 1, 3]))
    spread = tokens(jnp.array([[1.0, 2.0, 3.0]]), 7)
    none = -np.inf
    np.testing.assert_array_equal(spread, [[none, 1, 2, none, none, 3, none]])


def test_taps_are_near_the_begin_the_middle_and_the_end():
    deeper = read_architecture(LLAMA | {"num_hidden_layers": 32})
    assert read_eagle("eagle3", HEAD, deeper, max_model_len=64).taps == (2, 16, 29)
    assert read(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 4]}).taps == (0, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers=2 is not supported; supported is 1"),
        ({"hidden_size": 32}, "hidden_size=32 is not supported; supported is 64"),
        ({"vocab_size": 400}, "vocab_size=400 is not supported"),
        ({"target_hidden_size": 128}, "target_hidden_size=128 is not supported"),
        ({"model_type": "qwen3"}, "model_type='qwen3' is not supported"),
        ({"parallel_drafting": True}, "parallel_drafting=True is not supported"),
        ({"add_para_norm": True}, "add_para_norm=True is not supported"),
        ({"draft_vocab_size": 500}, "draft_vocab_size=500 is above vocab_size"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state must be true"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 5]}, "the model has 4 layers"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "must be a list of numbers"),
        ({"quantization_config": {"quant_method": "fp8"}}, "whose weights are codes"),
        ({"depth": 3}, "depth=3 is a field that"),
    ],
)
def test_other_heads_are_refused(fields, message):
    with pytest.raises((UnsupportedModelError, CheckpointError)) as refusal:
        read(**fields)
    assert message in str(refusal.value)


def test_a_model_without_a_layer_behind_it_is_refused(tmp_path):
    model = make_tiny_checkpoint(tmp_path, "deepseek_v3", num_nextn_predict_layers=0)
    with pytest.raises(UnsupportedModelError, match="num_nextn_predict_layers=0: the model has no"):
        head_of(model)
