"""OLMo Hybrid: OLMo 3 with a gated delta net in three layers of four, and no windows.

Layers of delta nets have their norms before both halves, those of attention behind. What a delta
net corrects of a key may exceed it, up to twice.
"""

import dataclasses
from typing import Any

from jaxllm.errors import UnsupportedModelError
from jaxllm.layers.gated_delta import GatedDeltaSpec
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.models.blocks import PreNormBlock
from jaxllm.models.checkpoint_map import (
    LLAMA_NAMES,
    CheckpointMap,
    Place,
    Source,
    as_named,
    concatenated,
)
from jaxllm.models.families.olmo2 import olmo_layer
from jaxllm.models.family import Family, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_recurrent import LINEAR, read_gated_delta, read_kinds, taps_apart
from jaxllm.models.rope_parameters import read_rope
from jaxllm.models.specs import Architecture, LayerSpec

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 100_352,
    "hidden_size": 3840,
    "intermediate_size": 11_008,
    "num_attention_heads": 30,
    "max_position_embeddings": 65_536,
    "rms_norm_eps": 1e-6,
}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, o_bias=bias, rotates=False)
    if _rotates(config):
        rope = read_rope(config, head_size=attention.head_size)
        attention = dataclasses.replace(attention, rope=rope)
    norm = RMSNormSpec(eps=config.positive("rms_norm_eps", 1e-6), rounds_first=False)
    mlp = read_mlp(config)
    of_attention = dataclasses.replace(olmo_layer(config, attention), norm=norm)
    recurrent = LayerSpec(mixers=(_read_delta(config),), ffns=(mlp,), norm=norm, block=PreNormBlock)
    kinds = _read_kinds(config)
    layers = [recurrent if is_recurrent else of_attention for is_recurrent in kinds]
    return read_decoder(name, config, layers)


def _rotates(config: HFConfig) -> bool:
    """Whether attention rotates: not if the base of the rotation is null."""
    parameters = config.get("rope_parameters", {})
    if parameters is None and config.get("rope_theta") is None:
        raise UnsupportedModelError(
            "config.json: rope_parameters=None is not supported, since it may mean the default "
            "rotation or none; use hf_overrides={'rope_parameters': {'rope_theta': None}} for none"
        )
    return not (isinstance(parameters, dict) and parameters.get("rope_theta", 1.0) is None)


def _read_kinds(config: HFConfig) -> list[bool]:
    """Whether each layer has a delta net."""
    kinds = read_kinds(config, (LINEAR,))
    if kinds is not None:
        return kinds
    num_layers = config.integer("num_hidden_layers")
    kinds = [index % 4 != 3 for index in range(num_layers)]
    return kinds if not all(kinds) else [*kinds[:-1], False]


def _read_delta(config: HFConfig) -> GatedDeltaSpec:
    heads = config.integer("num_attention_heads")
    num_keys = config.integer("linear_num_key_heads", heads)
    key_size = config.integer(
        "linear_key_head_dim", max(1, int(0.75 * config.integer("hidden_size") / num_keys))
    )
    sizes = {
        "linear_num_key_heads": num_keys,
        "linear_num_value_heads": config.integer("linear_num_value_heads", heads),
        "linear_key_head_dim": key_size,
        "linear_value_head_dim": config.integer("linear_value_head_dim", 2 * key_size),
    }
    return dataclasses.replace(
        read_gated_delta(config.replaced(sizes)),
        norm=RMSNormSpec(eps=1e-5),
        beta_scale=2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0,
    )


def _checkpoint(architecture: Architecture) -> CheckpointMap:
    def norm_behind_mixer(place: Place) -> Source:
        layer = architecture.layers[int(place.parent.rpartition(".")[2])]
        if layer.block is PreNormBlock:
            return as_named(place._replace(module="feedforward_layer_norm"))
        return as_named(place)

    return LLAMA_NAMES.with_rules(
        in_proj_qkvz=concatenated("q_proj", "k_proj", "v_proj", "g_proj"),
        in_proj_ba=concatenated("b_proj", "a_proj"),
        conv1d=taps_apart,
        norm=_norm,
        post_attention_layernorm=norm_behind_mixer,
    ).with_names(out_proj="o_proj", input_layernorm="attention_layer_norm")


def _norm(place: Place) -> Source:
    """That of a delta net, or the decoder's final one."""
    return as_named(place._replace(module="o_norm") if "." in place.parent else place)


FAMILY = Family(
    read=read,
    checkpoint=_checkpoint,
    tiny={
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": "olmo_hybrid",
        "num_hidden_layers": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
    tiny_gains={"linear_attn": -1.0},
    harmless=dict.fromkeys(
        (
            "linear_a_log_min",
            "linear_a_log_max",
            "linear_dt_min",
            "linear_dt_max",
            "linear_dt_init_floor",
        ),
        "acts in training only: how weights begin",
    ),
)
