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
        (
            "qwen3_next",
            "mtp.",
            {"fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight",
             "norm.weight", "layers.0.input_layernorm.weight", "layers.0.self_attn.q_norm.weight",
             "layers.0.mlp.experts.7.up_proj.weight", "layers.0.mlp.shared_expert.up_proj.weight",
             "layers.0.mlp.shared_expert_gate.weight"},
        ),
        (
            "qwen3_5",
            "mtp.",
            {"fc.weight", "layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"},
        ),
        (
            "nemotron_h",
            "mtp.layers.",
            {"0.enorm.weight", "0.hnorm.weight", "0.eh_proj.weight", "0.norm.weight",
             "0.mixer.v_proj.weight", "1.norm.weight", "1.mixer.gate.e_score_correction_bias",
             "1.mixer.experts.7.up_proj.weight", "1.mixer.shared_experts.down_proj.weight",
             "1.final_layernorm.weight"},
        ),
    ],
)  # fmt: skip
def test_a_checkpoint_has_its_head_under_these_names(family, begin, names, tmp_path):
    count = "mtp_num_hidden_layers" if family == "qwen3_5" else "num_nextn_predict_layers"
    model = make_tiny_checkpoint(tmp_path, family, **{count: 1})
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


# The modules of both inputs' norms, of the projection, and of the last norm.
DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
PARTS = {
    "glm4_moe": DEEPSEEK,
    "mimo_v2": (*DEEPSEEK[:3], "final_layernorm"),
    "qwen3_next": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "mtp.norm"),
    "nemotron_h": ("0.enorm", "0.hnorm", "0.eh_proj", "1.final_layernorm"),
}


@pytest.mark.parametrize("family", PARTS)
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
        of_ones = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + spec.norm.eps)
        return of_ones * (weight + 1 if family == "qwen3_next" else weight)

    of_embedded, of_hidden, projection, last = PARTS[family]
    [project] = [value for key, value in tensors.items() if f"{projection}.weight" in key]
    both = np.concatenate([norm(embedded, of_embedded), norm(hidden, of_hidden)], axis=1)
    both = both @ project.T
    given, _ = head(embedded, hidden, (), None)
    # DeepSeek and GLM go on from before the last norm, others from behind it.
    goes_on = both if family == "glm4_moe" else norm(both, last)
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


@pytest.mark.parametrize("stacks", [False, True])
def test_a_head_is_beside_a_decoder_inside_a_larger_model(tmp_path, stacks):
    """Its experts may be in another layout than the decoder's. A second layer is left out."""
    model = make_tiny_checkpoint(
        tmp_path,
        "qwen3_5",
        architectures=["Qwen3_5MoeForCausalLM"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        mtp_num_hidden_layers=2,
    )
    head = add_mtp(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": config})
    )
    tensors = load_file(model / "model.safetensors")
    at = "mtp.layers.0.mlp.experts"
    gates, ups, downs = (
        np.stack([tensors[f"{at}.{index}.{name}_proj.weight"] for index in range(4)])
        for name in ("gate", "up", "down")
    )
    tensors = {
        name.replace("model.", "model.language_model."): value
        for name, value in tensors.items()
        if not (stacks and name.startswith(at))
    } | {"mtp.layers.1.self_attn.q_proj.weight": gates}
    if stacks:
        tensors[f"{at}.gate_up_proj"] = np.concatenate([gates, ups], axis=1)
        tensors[f"{at}.down_proj"] = downs
    save_file(tensors, model / "model.safetensors")
    state = load_weights(model, head_of(model).abstract(np.float32, 1))
    experts = state["layer"]["mlp"]["experts"]
    np.testing.assert_array_equal(experts["w13_weight"], np.stack([gates, ups], axis=1))
    np.testing.assert_array_equal(experts["w2_weight"], downs)
    np.testing.assert_array_equal(state["eh_proj"]["weight"], head["mtp.fc.weight"])


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("qwen3_5", {"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers=0: the model has no lay"),
        ("qwen3_5", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True is"),
        ("qwen3_next", {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers=0: the model"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 4}, "there are none in it"),
        ("nemotron_h", {"num_nextn_predict_layers": None}, "num_nextn_predict_layers=None: layers"),
        ("nemotron_h", {"mtp_layers_block_type": ["mamba", "moe"]}, "mtp_layers_block_type="),
        ("nemotron_h", {"mtp_hybrid_override_pattern": "*-"}, r"mtp_hybrid_override_pattern='\*-'"),
        ("nemotron_h", {"hybrid_override_pattern": "M*-M*"}, "the decoder's experts, and there"),
    ],
)
def test_other_layers_that_draft_are_refused(family, config, message):
    config = tiny_config(family) | {"dtype": "float32", "num_nextn_predict_layers": 1} | config
    if family == "qwen3_5":
        del config["num_nextn_predict_layers"]
    architecture = read_architecture(config)
    with pytest.raises(UnsupportedModelError, match=message):
        ModelRegistry.family(architecture.name).draft_head(architecture)
