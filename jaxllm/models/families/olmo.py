"""OLMo 1: Llama with norms that have no weights, and with clamped queries, keys and values.

The norms are LayerNorms. The clamp exists if `clip_qkv` says how far values may be from zero.
"""

import dataclasses

from jaxllm.layers.norm import LayerNormSpec
from jaxllm.models.blocks import PreNormBlock
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import Family, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture, LayerSpec

NORM = LayerNormSpec(eps=1e-5, has_weight=False, has_bias=False)


def read(name: str, config: HFConfig) -> Architecture:
    bias = config.flag("attention_bias")
    attention = dataclasses.replace(
        read_attention(config, qkv_bias=bias, o_bias=bias),
        qkv_clip=config.optional_positive("clip_qkv"),
    )
    layer = LayerSpec(mixers=(attention,), ffns=(read_mlp(config),), norm=NORM, block=PreNormBlock)
    return read_decoder(name, config, [layer] * config.integer("num_hidden_layers"))


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES,
    tiny={
        "architectures": ["OlmoForCausalLM"],
        "model_type": "olmo",
        "rms_norm_eps": None,
        "clip_qkv": 1.0,
    },
)
