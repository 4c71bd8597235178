"""Fields of a family's config.json whose values ask for another computation are refused by name."""

import pytest

from jaxllm.errors import CheckpointError, UnsupportedModelError
from jaxllm.models.architecture import read_architecture
from jaxllm.models.registry import load_family
from jaxllm.testing import tiny_config

LAYERS = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama", {"rope_interleaved": True}, "rope_interleaved=True is not supported"),
        ("qwen2", {"use_mrope": True}, "use_mrope=True is not supported"),
        ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm=False is not supported"),
        (
            "stablelm",
            {"rotary_scaling_factor": 0.5},
            r"rotary_scaling_factor=0\.5 is not supported",
        ),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers=\[1\] must be a list of 0 and 1"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, r"no_rope_layers=\[1, 2, 0\] must be a list"),
        (
            "smollm3",
            {"layer_types": [*LAYERS, LAYERS[0]]},
            "layer_types asks for sliding_attention",
        ),
        ("seed_oss", {"layer_types": LAYERS}, "layer_types=.* is a field that"),
        ("phi3", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias=True is not supported"),
        ("phi3", {"interpolate_factor": 2}, "interpolate_factor=2 is not supported"),
        ("phi3", {"blocksparse_params": {"block_size": 64}}, "blocksparse_params=.* is a field"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_mscale": 1.1}},
            "rope parameter short_mscale is not supported",
        ),
        ("ernie4_5", {"compression_ratio": 2.0}, r"compression_ratio=2\.0 is not supported"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla=True is not supported"),
        ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm=False is not supported"),
        ("hunyuan_v1_dense", {"attention_head_dim": 32}, "attention_head_dim=32 is not supported"),
        ("hunyuan_v1_dense", {"num_experts": 16}, "num_experts=16 is not supported"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 9.0}}, "alpha"),
        (
            "hunyuan_v1_dense",
            {"head_dim": 4, "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1e18}},
            "rope_theta=1e.40 must be at least",
        ),
        ("starcoder2", {"mlp_type": "gated"}, "mlp_type='gated' is not supported"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern='LLLG' must be an"),
        (
            "exaone4",
            {"sliding_window": None, "layer_types": ["full_attention", *LAYERS]},
            "asks for",
        ),
        ("mistral3", {"layer_types": LAYERS}, "layer_types that differ between layers"),
        ("mistral3", {"layer_types": LAYERS[1:] * 2}, "or from sliding_window=None"),
        ("granite", {"attention_multiplier": 0}, "attention_multiplier=0 must be a number above"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for experts"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 is above num_local_exp"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, r"mlp_only_layers=\[True\] must be a list of"),
        ("qwen3_moe", {"num_experts": 1 << 15}, "num_experts is 32768; at most 16384"),
        ("olmoe", {"clip_qkv": 8.0}, r"clip_qkv=8\.0 is not supported for OLMoE"),
        ("gpt_oss", {"quantization_config": {"quant_method": "hqq"}}, "hqq is not supported"),
        ("gpt_oss", {"experts_per_token": 4}, "experts_per_token=4 is not supported"),
        ("glm4_moe", {"n_group": 3}, "n_group=3 does not divide the 8 experts"),
        ("glm4_moe", {"topk_group": 5}, "topk_group=5 of n_group=4 groups do not have"),
        ("glm4_moe", {"num_experts_per_tok": 5}, "do not have the 5 experts of a token"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=True is not supported"),
        ("hunyuan_v1_moe", {"moe_topk": [3, 2]}, r"moe_topk=\[3, 2\] is not supported"),
        ("hunyuan_v1_moe", {"num_shared_expert": 2}, "num_shared_expert=2 is not supported"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not supported"),
        ("deepseek_v2", {"rope_interleave": False}, "rope_interleave=False is not supported"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 must be num_attention"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        ("deepseek_v32", {"index_topk": 128}, "beyond index_topk=128 .* set max_model_len to at"),
        ("deepseek_v32", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries for"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"]}, "'dense' layers before all"),
        ("glm4_moe_lite", {"partial_rotary_factor": 0.5}, "rotating a part of the head is not"),
        (
            "mistral4",
            {"partial_rotary_factor": 0.5},
            "rotates 12 .* contradicts qk_rope_head_dim=8",
        ),
        ("minimax_m2", {"attn_type_list": [1, 0]}, r"attn_type_list=\[1, 0\] is not supported"),
        ("lfm2", {"conv_dim_out": 32}, "conv_dim_out=32 is not supported; supported is 64"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, "8 heads of Mamba2 mixers are not a multiple"),
        ("granitemoehybrid", {"mamba_d_head": 12}, "8 heads of 12 in Mamba2 mixers are not"),
        (
            "granitemoehybrid",
            {"time_step_limit": [1]},
            r"time_step_limit=\[1\] must be the",
        ),
        ("granitemoehybrid", {"layer_types": ["mlp"] * 4}, "layer type mlp is not supported"),
        ("bamba", {"attn_layer_indices": [3]}, r"attn_layer_indices=\[3\] must be below num_hid"),
        ("falcon_h1", {"attention_bias": True}, "attention_bias=True is not supported for Falcon"),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, r"mlp_multipliers=\[1\.0\] must be a list of 2"),
        ("nemotron_h", {"hybrid_override_pattern": "MXE"}, "layer type X is not supported"),
        ("nemotron_h", {"num_hidden_layers": 4}, "num_hidden_layers=4 is not supported"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported for ex"),
        (
            "olmo_hybrid",
            {"rope_theta": None, "rope_parameters": None},
            "rope_parameters=None is not supported, since it may mean",
        ),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=False is not supported"),
        (
            "kimi_linear",
            {"linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [3]}},
            "must have each of the layers 1 to 4 once",
        ),
        ("kimi_linear", {"layer_types": ["linear_attention"] * 4}, "layer_types contradicts kda"),
        ("kimi_linear", {"mlp_layer_types": ["dense"]}, "supported is dense or sparse for each"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for convolutions"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache=1 is not supported; supported are 2 to 64"),
        (
            "lfm2",
            {"layer_types": None, "full_attn_idxs": [4]},
            r"full_attn_idxs=\[4\] must be below",
        ),
    ],
)
def test_other_designs(family, fields, message):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read_architecture(tiny_config(family) | fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"model_type": "mistral5"}, "model_type='mistral5' in text_config is not supported"),
        (
            {"model_type": "mistral", "alibi": True},
            r"alibi=True is .*\{'text_config': \{'alibi': None\}\}",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config of a part"),
        (None, "text_config=None must be an object"),
    ],
)
def test_decoders_inside_mistral_3(text, message):
    fields = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read_architecture(fields)


def test_a_cap_of_logits_that_transformers_ignores():
    text = tiny_config("gemma3") | {"final_logit_softcapping": 30.0}
    fields = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    with pytest.raises(UnsupportedModelError, match=r"final_logit_softcapping=30\.0 is not"):
        read_architecture(fields)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "mrope_section=None must be three numbers above zero, 16 together"),
        ({"mrope_section": [6, 5, 4]}, r"mrope_section=\[6, 5, 4\] must be three numbers"),
        ({"mrope_section": [6, 10]}, r"mrope_section=\[6, 10\] must be three numbers"),
        (
            {"mrope_section": [6, 5, 5], "mrope_interleaved": "no"},
            "mrope_interleaved='no' must be true or false",
        ),
        (
            {"mrope_section": [6, 5, 5], "mrope_interleaved": False},
            "mrope_interleaved=False is not supported in this family",
        ),
        (
            {"mrope_section": [6, 5, 5], "rope_type": "dynamic", "factor": 2.0},
            "'dynamic' is not supported with mrope_section",
        ),
    ],
)
def test_positions_on_three_axes(parameters, message):
    text = tiny_config("qwen3") | {"rope_parameters": {"rope_type": "default"} | parameters}
    fields = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text}
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read_architecture(fields)


def test_pairs_of_qwen3_vl_take_turns_also_if_the_config_does_not_say_so():
    """As in transformers, whose classes do not ask for it."""
    for family, name in (("qwen3", "Qwen3VL"), ("qwen3_moe", "Qwen3VLMoe"), ("qwen3_5", "Qwen3_5")):
        rope = {"rope_type": "default", "partial_rotary_factor": 1.0, "mrope_section": [6, 5, 5]}
        text = tiny_config(family) | {"head_dim": 32, "rope_parameters": rope}
        fields = {"architectures": [f"{name}ForConditionalGeneration"], "text_config": text}
        (rope,) = {its.rope for its in read_architecture(fields).layers if its.rope is not None}
        assert rope.axes == (0, 1, 2) * 5 + (0,)


@pytest.mark.parametrize(
    ("where", "field", "message"),
    [
        ("vision_config", {"deepstack_visual_indexes": [1]}, "deepstack_visual_indexes=.* is not"),
        ("vision_config", {"model_type": "qwen3_vl"}, "model_type='qwen3_vl' is not supported"),
        (None, {"language_model_only": True}, "language_model_only=True is not supported"),
        ("text_config", {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' is not"),
    ],
)
def test_towers_of_qwen3_5(where, field, message):
    family = load_family("qwen3_5")
    fields = {**family.tiny_config_around, "text_config": tiny_config("qwen3_5")}
    assert read_architecture(fields, sees_images=True).tower is not None
    fields |= field if where is None else {where: {**fields[where], **field}}
    with pytest.raises(UnsupportedModelError, match=message):
        read_architecture(fields, sees_images=True)
