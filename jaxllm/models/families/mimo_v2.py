"""MiMo V2: experts that a sigmoid scores, windows with sinks in most layers, values unlike keys.

Heads of values are smaller than those of keys, and values are scaled. Layers with a window have
twice the kv heads of the others, a sink for each head, and a rotation with a base of their own. A
third of each head is rotated. Of the layers that draft tokens, the first does if it is asked to;
the others are left out. Releases in 8 bits are refused.
"""

import dataclasses

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.layers.attention import AttentionSpec
from jaxllm.layers.mlp import MLPSpec
from jaxllm.models.checkpoint_map import LLAMA_NAMES, CheckpointMap, Place, Source
from jaxllm.models.draft_head import HeadSpec
from jaxllm.models.expert_tensors import each_expert
from jaxllm.models.families.glm4_moe import read_sigmoid_router
from jaxllm.models.family import (
    FULL,
    SLIDING,
    Family,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_mlp,
)
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.mtp import behind_decoder
from jaxllm.models.read_moe import TRAINING, read_moe, read_numbers
from jaxllm.models.specs import Architecture, MixerSpec

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "intermediate_size": 16_384,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "sliding_window": 129,
    "attention_value_scale": 0.707,
    "rms_norm_eps": 1e-5,
    "layernorm_epsilon": 1e-5,
}
_DENSE, _SPARSE = "dense", "sparse"


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS).where(rms_norm_eps="layernorm_epsilon")
    _refuse_other_designs(config)
    if config.get("routed_scaling_factor") is None:
        config = config.replaced({"routed_scaling_factor": 1.0})
    mlp = read_mlp(config)
    moe = read_moe(config, read_sigmoid_router(config), count="n_routed_experts")
    num_layers = config.integer("num_hidden_layers")
    kinds = config.layer_types(num_layers, supported=(FULL, SLIDING))
    if kinds is None:
        kinds = _by_number(config, "hybrid_layer_pattern", (FULL, SLIDING))
    if kinds is None:
        kinds = [FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(num_layers)]
    ffns = config.names("mlp_layer_types") or _by_number(
        config, "moe_layer_freq", (_DENSE, _SPARSE)
    )
    ffns = ffns or [_DENSE] + [_SPARSE] * (num_layers - 1)
    if len(ffns) != num_layers or not set(ffns) <= {_DENSE, _SPARSE}:
        raise CheckpointError(
            f"config.json: mlp_layer_types={shown(ffns)} must say '{_DENSE}' or '{_SPARSE}' for "
            f"each of num_hidden_layers={num_layers}"
        )
    attentions = {kind: _read_attention(config, kind) for kind in set(kinds)}
    layers = [
        pre_norm_layer(config, attentions[kind], moe if ffn == _SPARSE else mlp)
        for kind, ffn in zip(kinds, ffns, strict=True)
    ]
    return read_decoder(name, config, layers)


def _read_attention(config: HFConfig, kind: str) -> AttentionSpec:
    is_sliding = kind == SLIDING
    if is_sliding:
        heads = 2 * config.integer("num_key_value_heads")
        heads = config.integer("swa_num_key_value_heads", heads)
        config = config.replaced({"num_key_value_heads": heads})
    attention = read_attention(
        config,
        qkv_bias=config.flag("attention_bias"),
        may_rotate_a_part=True,
        layer_type=kind,
        theta_field="swa_rope_theta" if is_sliding else "rope_theta",
        default_theta=10_000.0 if is_sliding else 5_000_000.0,
        default_share=0.334,
    )
    return dataclasses.replace(
        attention,
        v_head_size=config.integer("v_head_dim"),
        value_scale=config.optional_positive("attention_value_scale") or 1.0,
        window=_read_window(config) if is_sliding else None,
        has_sinks=is_sliding,
    )


def _read_window(config: HFConfig) -> int:
    """The window. The field of the releases does not count the token itself."""
    window = config.integer("sliding_window")
    if config.get("sliding_window_size") is None:
        return window
    return config.integer("sliding_window_size") + 1


def _by_number(config: HFConfig, name: str, kinds: tuple[str, str]) -> list[str] | None:
    """The kind of each layer of a list of 0 and 1, as the releases have it."""
    numbers = read_numbers(config, name)
    num_layers = config.integer("num_hidden_layers")
    if not numbers:
        return None
    if len(numbers) != num_layers or not set(numbers) <= {0, 1}:
        raise CheckpointError(
            f"config.json: {name}={shown(numbers)} must be a list of 0 and 1, one for each of "
            f"num_hidden_layers={num_layers}"
        )
    return [kinds[number] for number in numbers]


def _refuse_other_designs(config: HFConfig) -> None:
    """Released configs describe the family in fields that have one value each."""
    for of_windows, of_all in (
        ("swa_num_attention_heads", "num_attention_heads"),
        ("swa_head_dim", "head_dim"),
        ("swa_v_head_dim", "v_head_dim"),
    ):
        config.must_be(of_windows, config.integer(of_all))
    config.must_be("add_swa_attention_sink_bias", True)
    config.must_be("add_full_attention_sink_bias", False)
    config.must_be("scoring_func", "sigmoid")
    config.must_be("topk_method", "noaux_tc")
    config.must_be("n_shared_experts")


def _sinks(place: Place) -> Source:
    """The only parameter that is the attention's own."""
    assert place.leaf == "sinks", place
    return place._replace(leaf="attention_sink_bias").tensor("self_attn", *place.pieces)


def _checkpoint(architecture: Architecture) -> CheckpointMap:
    names = LLAMA_NAMES.with_rules(experts=each_expert(), self_attn=_sinks)
    return dataclasses.replace(names, ignored=(*names.ignored, r"model\.mtp\..*"))


def _draft_head(architecture: Architecture) -> HeadSpec:
    """The first layer that drafts. It has a window, and no experts."""
    layers = architecture.layers
    attentions = (mixer for layer in layers for mixer in layer.mixers if _has_sinks(mixer))
    attention, dense = next(attentions, None), next((f for f in layers[0].ffns), None)
    if attention is None or not isinstance(dense, MLPSpec):
        raise UnsupportedModelError(
            "the layer that drafts has the window of other layers and the MLP of the first one, "
            "and the model lacks one of them"
        )
    return behind_decoder(
        architecture,
        _checkpoint(architecture),
        layer=dataclasses.replace(layers[0], mixers=(attention,)),
        at="model.mtp.layers.0",
        norm="final_layernorm",
        passes_normed=True,
        renamed={"post_attention_layernorm": "pre_mlp_layernorm"},
    )


def _has_sinks(mixer: MixerSpec) -> bool:
    return isinstance(mixer, AttentionSpec) and mixer.has_sinks


FAMILY = Family(
    read=read,
    checkpoint=_checkpoint,
    tiny={
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "num_hidden_layers": 3,
        "head_dim": 24,
        "v_head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "routed_scaling_factor": 1.5,
        "layer_types": [FULL, SLIDING, FULL],
        "mlp_layer_types": [_DENSE, _SPARSE, _SPARSE],
        "rope_theta": None,
        "rope_parameters": {
            FULL: {
                "rope_type": "default",
                "rope_theta": 5_000_000.0,
                "partial_rotary_factor": 0.334,
            },
            SLIDING: {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.334,
            },
        },
    },
    tiny_gains={"gate": 2.0},
    harmless=TRAINING
    | {
        "attention_chunk_size": "repeats sliding_window_size; no layer is chunked",
        "hybrid_block_size": "hybrid_layer_pattern says which layers have a window",
        "hybrid_layer_pattern": "layer_types says the same, if both are given",
        "moe_layer_freq": "mlp_layer_types says the same, if both are given",
        "num_nextn_predict_layers": "counts layers that draft tokens, of which the first may",
        "num_local_experts": "repeats n_routed_experts",
    },
    draft_head=_draft_head,
)
