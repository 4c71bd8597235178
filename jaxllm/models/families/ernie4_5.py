"""ERNIE 4.5, dense: Llama whose heads rotate neighbours, not halves, and with one flag for biases.

The flag is for all projections of a layer. The released model ties its embeddings.
"""

from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import (
    Family,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_mlp,
    with_rotated_pairs,
)
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    config.must_be("compression_ratio", 1)
    bias = config.flag("use_bias")
    layer = pre_norm_layer(
        config,
        read_attention(config, qkv_bias=bias, o_bias=bias, default_theta=500_000.0),
        read_mlp(config, bias=bias),
    )
    return read_decoder(name, config, [layer] * config.integer("num_hidden_layers"))


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: with_rotated_pairs(LLAMA_NAMES, architecture),
    tiny={
        "architectures": ["Ernie4_5ForCausalLM"],
        "model_type": "ernie4_5",
        "head_dim": 24,
        "tie_word_embeddings": True,
        "use_bias": True,
    },
)
