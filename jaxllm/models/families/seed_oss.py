"""Seed-OSS: Llama with biases on q, k and v by default, and heads of their own size.

The bias of the output projection has a flag of its own.
"""

from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import Family, pre_norm_layer, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    layer = pre_norm_layer(
        config,
        read_attention(
            config,
            qkv_bias=config.flag("attention_bias", True),
            o_bias=config.flag("attention_out_bias"),
        ),
        read_mlp(config, bias=config.flag("mlp_bias")),
    )
    return read_decoder(name, config, [layer] * config.integer("num_hidden_layers"))


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES,
    tiny={
        "architectures": ["SeedOssForCausalLM"],
        "model_type": "seed_oss",
        "head_dim": 24,
        "attention_bias": True,
    },
)
