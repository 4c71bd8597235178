"""GLM-4 0414: the GLM-4 of 2024 with norms before and after both halves of a layer.

Here the norm called `post_attention_layernorm` stands before the MLP.
"""

import dataclasses

from jaxllm.models.blocks import SandwichBlock
from jaxllm.models.checkpoint_map import CheckpointMap
from jaxllm.models.families import glm
from jaxllm.models.family import Family, pre_norm_layer, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture

# The norms of the block -> their names in the checkpoint.
_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(glm.DEFAULTS)
    layer = dataclasses.replace(
        pre_norm_layer(config, glm.read_glm_attention(config), read_mlp(config)),
        block=SandwichBlock,
    )
    return read_decoder(name, config, [layer] * config.integer("num_hidden_layers"))


def _checkpoint(architecture: Architecture) -> CheckpointMap:
    return glm.checkpoint(architecture).with_names(**_NORMS)


FAMILY = Family(
    read=read,
    checkpoint=_checkpoint,
    tiny={
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "head_dim": 24,
        "attention_bias": True,
    },
)
