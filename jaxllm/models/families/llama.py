"""Llama 2, 3, 3.1 and other models of the same architecture: the plain dense decoder.

It has a norm before the attention and one before the gated MLP. Either has biases on all of its
projections or on none. Any rope scaling is supported.
"""

from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import Family, pre_norm_layer, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture


def read(name: str, config: HFConfig) -> Architecture:
    # SmolLM2 and Falcon 3 say so.
    config.must_be("rope_interleaved", False)
    config.must_be("activation", "swiglu")
    bias = config.flag("attention_bias")
    layer = pre_norm_layer(
        config,
        read_attention(config, qkv_bias=bias, o_bias=bias),
        read_mlp(config, bias=config.flag("mlp_bias")),
    )
    return read_decoder(name, config, [layer] * config.integer("num_hidden_layers"))


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES,
    tiny={"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
)
