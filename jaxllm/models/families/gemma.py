"""Gemma 1: Llama with embeddings scaled by the root of their size, and a gate of approximate GELU.

One is added to the weights of its norms, which are stored around zero. The head is the embedding,
and heads have 256 elements.
"""

import dataclasses

from jaxllm.layers.mlp import MLPSpec
from jaxllm.models.blocks import PreNormBlock
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.families.gemma2 import read_norm, refuse_bidirectional
from jaxllm.models.family import Family, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture, LayerSpec


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults({"num_key_value_heads": 16})
    refuse_bidirectional(config)
    bias = config.flag("attention_bias")
    layer = LayerSpec(
        mixers=(read_attention(config, default_head_size=256, qkv_bias=bias, o_bias=bias),),
        ffns=(_read_mlp(config),),
        norm=read_norm(config),
        block=PreNormBlock,
    )
    return read_decoder(
        name,
        config,
        [layer] * config.integer("num_hidden_layers"),
        is_tied_by_default=True,
        embedding_scale=config.integer("hidden_size") ** 0.5,
    )


def _read_mlp(config: HFConfig) -> MLPSpec:
    """`hidden_activation` takes precedence. Files with only the older `hidden_act` say "gelu" and
    mean its approximation."""
    mlp = read_mlp(config, default_activation="gelu_pytorch_tanh")
    if config.get("hidden_activation") is not None:
        return read_mlp(config, activation="hidden_activation")
    if mlp.activation == "gelu":
        return dataclasses.replace(mlp, activation="gelu_pytorch_tanh")
    return mlp


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES,
    tiny={
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "hidden_act": "gelu",
        "head_dim": 24,
        "tie_word_embeddings": True,
    },
)
