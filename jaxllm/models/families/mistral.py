"""Mistral: Llama with a sliding window in every layer, and without biases."""

import dataclasses

from jaxllm.errors import UnsupportedModelError
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import Family, pre_norm_layer, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults({"num_key_value_heads": 8})
    window = None
    if config.get("sliding_window", 4096) is not None:
        window = config.integer("sliding_window", 4096)
    kind = "full_attention" if window is None else "sliding_attention"
    num_layers = config.integer("num_hidden_layers")
    if set(config.layer_types(num_layers) or ()) - {kind}:
        raise UnsupportedModelError(
            "layer_types that differ between layers are not supported for MistralForCausalLM"
        )
    attention = dataclasses.replace(read_attention(config), window=window)
    layer = pre_norm_layer(config, attention, read_mlp(config))
    return read_decoder(name, config, [layer] * num_layers)


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES,
    tiny={
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 32,
    },
)
