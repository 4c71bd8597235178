"""Granite 3: Llama with four multipliers.

They multiply the embeddings, the scores in place of head_dim^-0.5, what a layer adds to the
residual stream, and, as a divisor, the logits. The 8B and 2B models tie their embeddings.
"""

import dataclasses
from collections.abc import Sequence

from jaxllm.layers.attention import AttentionSpec
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import Family, pre_norm_layer, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture, FFNSpec, MixerSpec


def read(name: str, config: HFConfig) -> Architecture:
    return read_granite(name, config, read_mlp(config, bias=config.flag("mlp_bias")))


def read_attention_of_granite(config: HFConfig) -> AttentionSpec:
    bias = config.flag("attention_bias")
    return dataclasses.replace(
        read_attention(config, qkv_bias=bias, o_bias=bias),
        scale=config.positive("attention_multiplier", 1.0),
    )


def read_granite(
    name: str, config: HFConfig, ffn: FFNSpec, mixers: Sequence[MixerSpec] | None = None
) -> Architecture:
    """Read a Granite with this ffn in all layers. Without `mixers` all have the same attention."""
    if mixers is None:
        num_layers = config.integer("num_hidden_layers")
        mixers = [read_attention_of_granite(config)] * num_layers
    scale = config.positive("residual_multiplier", 1.0)
    layers = [
        dataclasses.replace(pre_norm_layer(config, mixer, ffn), residual_scale=scale)
        for mixer in mixers
    ]
    return read_decoder(
        name,
        config,
        layers,
        embedding_scale=config.positive("embedding_multiplier", 1.0),
        logits_scale=1 / config.positive("logits_scaling", 1.0),
    )


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES,
    tiny={
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "tie_word_embeddings": True,
        "embedding_multiplier": 1.5,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.25,
    },
)
