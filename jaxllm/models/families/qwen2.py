"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a sliding window in some layers."""

import dataclasses

from jaxllm.layers.attention import AttentionSpec
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import (
    FULL,
    SLIDING,
    Family,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_mlp,
    windows_of,
)
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture

# Where its class has other defaults than Llama's.
DEFAULTS = {"num_key_value_heads": 32}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(DEFAULTS)
    config.must_be("use_mrope", False)
    attention = read_attention(config, qkv_bias=True)
    return read_qwen(name, config, attention)


def read_qwen(name: str, config: HFConfig, attention: AttentionSpec) -> Architecture:
    """Read a Qwen with this attention; layers with a window add the window to it."""
    mlp = read_mlp(config)
    layers = [
        pre_norm_layer(config, dataclasses.replace(attention, window=window), mlp)
        for window in read_windows(config)
    ]
    return read_decoder(name, config, layers)


def read_windows(config: HFConfig) -> list[int | None]:
    """The window of every layer; None in layers of full attention."""
    num_layers = config.integer("num_hidden_layers")
    # The first layers have full attention, the rest have the window.
    num_full = config.integer("max_window_layers", 28, lowest=0)
    window, is_used = config.get("sliding_window", 4096), config.flag("use_sliding_window")
    if window is not None:
        window = config.integer("sliding_window", 4096) if is_used else None
    kinds = config.layer_types(num_layers, supported=(FULL, SLIDING))
    if kinds is None:
        return [None if layer < num_full else window for layer in range(num_layers)]
    return windows_of(kinds, window)


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES,
    tiny={
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": True,
    },
)
