"""OLMo 3: OLMo 2 with a sliding window in three of four layers.

Layers with a window and layers of full attention have rotary embeddings of their own. Only that of
full attention is scaled, by YaRN in the released models.
"""

import dataclasses

from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.families.gemma2 import read_layer_types
from jaxllm.models.families.olmo2 import olmo_layer
from jaxllm.models.family import Family, read_attention, read_decoder, read_window, windows_of
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.rope_parameters import read_rope
from jaxllm.models.specs import Architecture


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults({"sliding_window": 4096})
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, o_bias=bias, rotates=False)
    kinds = read_layer_types(config, pattern=4)
    layers = []
    for kind, window in zip(kinds, windows_of(kinds, read_window(config)), strict=True):
        rope = read_rope(
            config,
            head_size=attention.head_size,
            layer_type=kind,
            is_scaled=window is None,
            default_theta=500_000.0,
        )
        layers.append(olmo_layer(config, dataclasses.replace(attention, window=window, rope=rope)))
    return read_decoder(name, config, layers)


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES,
    tiny={
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "rope_theta": 500_000.0,
    },
)
