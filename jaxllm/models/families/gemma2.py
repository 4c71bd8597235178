"""Gemma 2: norms around both halves of a layer, windows in every other layer, and soft caps.

Weights of norms are stored around zero. Embeddings are multiplied by the root of the hidden size,
and are the head, too. Scores and logits are capped, and the scale of scores is a field.
"""

import dataclasses
from typing import Any

from jaxllm.errors import UnsupportedModelError, shown
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.models.blocks import SandwichBlock
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import (
    FULL,
    SLIDING,
    Family,
    read_attention,
    read_decoder,
    read_mlp,
    read_window,
)
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture, LayerSpec

# Of the class in transformers, where they are not those that most families share.
DEFAULTS: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(
        DEFAULTS | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
    )
    refuse_bidirectional(config)
    bias = config.flag("attention_bias")
    full = dataclasses.replace(
        read_attention(config, default_head_size=256, qkv_bias=bias, o_bias=bias),
        scale=config.positive("query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=config.optional_positive("attn_logit_softcapping"),
    )
    attentions = {FULL: full, SLIDING: dataclasses.replace(full, window=read_window(config))}
    layers = [
        LayerSpec(
            mixers=(attentions[kind],),
            ffns=(read_mlp(config, activation="hidden_activation"),),
            norm=read_norm(config),
            block=SandwichBlock,
        )
        for kind in read_layer_types(config, pattern=2)
    ]
    return read_gemma(name, config, layers)


def read_gemma(name: str, config: HFConfig, layers: list[LayerSpec]) -> Architecture:
    """Read what every Gemma has around its layers."""
    return read_decoder(
        name,
        config,
        layers,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logits_soft_cap=config.optional_positive("final_logit_softcapping"),
    )


def read_norm(config: HFConfig) -> RMSNormSpec:
    return RMSNormSpec(eps=config.positive("rms_norm_eps", 1e-6), offset=1.0, rounds_first=False)


def read_layer_types(config: HFConfig, *, pattern: int) -> list[str]:
    """The type of every layer. By default each `pattern`th one has full attention."""
    num_layers = config.integer("num_hidden_layers")
    kinds = config.layer_types(num_layers, supported=(FULL, SLIDING))
    return kinds or [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(num_layers)]


def refuse_bidirectional(config: HFConfig) -> None:
    if value := config.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            f"use_bidirectional_attention={shown(value)} is not supported: a token sees only those "
            "before it"
        )


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES,
    tiny={
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 24,
        "query_pre_attn_scalar": 40,
        "sliding_window": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
        "num_hidden_layers": 3,
    },
    harmless={
        "hidden_act": "an older name of hidden_activation, which is read",
        "sliding_window_size": "repeats sliding_window",
    },
)
