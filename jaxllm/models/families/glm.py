"""GLM-4 9B of 2024: Llama that rotates neighbours in half of each head, with biases on q, k and v.

The checkpoint has the gate and the up projection in one tensor, as our module has.
"""

from jaxllm.layers.attention import AttentionSpec
from jaxllm.models.checkpoint_map import LLAMA_NAMES, CheckpointMap, as_named
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
DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(DEFAULTS)
    layer = pre_norm_layer(config, read_glm_attention(config), read_mlp(config))
    return read_decoder(name, config, [layer] * config.integer("num_hidden_layers"))


def read_glm_attention(config: HFConfig) -> AttentionSpec:
    return read_attention(
        config,
        qkv_bias=config.flag("attention_bias", True),
        may_rotate_a_part=True,
        default_share=0.5,
    )


def checkpoint(architecture: Architecture) -> CheckpointMap:
    return with_rotated_pairs(LLAMA_NAMES, architecture).with_rules(gate_up_proj=as_named)


FAMILY = Family(
    read=read,
    checkpoint=checkpoint,
    tiny={
        "architectures": ["GlmForCausalLM"],
        "model_type": "glm",
        "head_dim": 24,
        "attention_bias": True,
    },
)
