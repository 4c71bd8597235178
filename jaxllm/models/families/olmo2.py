"""OLMo 2: Llama with its norms behind attention and MLP, and a norm of queries and keys.

Nothing is normalised before attention and MLP. The norm of queries and the norm of keys are over
all heads together. All norms multiply by their weights before they round.
"""

import dataclasses

from jaxllm.layers.attention import AttentionSpec, QKNorm
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.models.blocks import PostNormBlock
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import Family, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture, LayerSpec


def read(name: str, config: HFConfig) -> Architecture:
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, o_bias=bias)
    layer = olmo_layer(config, attention)
    return read_decoder(name, config, [layer] * config.integer("num_hidden_layers"))


def olmo_layer(config: HFConfig, attention: AttentionSpec) -> LayerSpec:
    """A layer with this attention, to which the norm of queries and keys is added."""
    norm = RMSNormSpec(eps=config.positive("rms_norm_eps", 1e-5), rounds_first=False)
    attention = dataclasses.replace(attention, qk_norm=QKNorm(norm=norm, over_all_heads=True))
    return LayerSpec(mixers=(attention,), ffns=(read_mlp(config),), norm=norm, block=PostNormBlock)


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES,
    tiny={"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
)
