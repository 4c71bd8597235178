"""Mistral: Llama with a sliding window in every layer, and without biases."""

import dataclasses
from typing import Any

from jaxllm.errors import UnsupportedModelError
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import (
    FULL,
    SLIDING,
    Family,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_mlp,
    read_window,
)
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture

# Of the class in transformers. The config of a decoder inside a larger model leaves them out.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    window = read_window(config)
    refuse_mixed_layers(config, window)
    attention = dataclasses.replace(read_attention(config), window=window)
    layer = pre_norm_layer(config, attention, read_mlp(config))
    return read_decoder(name, config, [layer] * config.integer("num_hidden_layers"))


def refuse_mixed_layers(config: HFConfig, window: int | None) -> None:
    """Refuse `layer_types` that do not give every layer the window, or no window."""
    kinds = config.layer_types(config.integer("num_hidden_layers"))
    if set(kinds or ()) - {FULL if window is None else SLIDING}:
        raise UnsupportedModelError(
            f"layer_types that differ between layers, or from sliding_window={window}, are not "
            "supported for Mistral models"
        )


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES,
    tiny={
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 32,
    },
)
