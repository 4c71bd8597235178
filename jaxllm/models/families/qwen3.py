"""Qwen3, and Qwen3-VL, which also sees images and videos: Qwen2 with norms of query and key heads.

Qwen3-VL has the same decoder, with positions on three axes that take turns in the pairs of a head.
"""

import dataclasses
from typing import Any

from jaxllm.layers.attention import QKNorm
from jaxllm.models.around_decoder import beside_visual
from jaxllm.models.checkpoint_map import LLAMA_NAMES, CheckpointMap
from jaxllm.models.families.qwen2 import DEFAULTS, read_qwen
from jaxllm.models.family import Family, read_attention, read_norm
from jaxllm.models.harmless import AROUND_VISUAL
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.rope_parameters import with_axes
from jaxllm.models.specs import Architecture
from jaxllm.models.towers import qwen3_vl
from jaxllm.models.towers.qwen_patches import (
    TINY_IMAGE_IDS,
    TINY_IMAGE_TOKENS,
    TINY_PREPROCESSOR,
)

_VL = "Qwen3VLForConditionalGeneration"
# Of the class in transformers. The config of a decoder inside a larger model leaves them out.
_VL_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128_000,
    "sliding_window": None,
}
# What `read_rope` knows of Qwen3-VL's rotations, also with experts.
ROPE_OF_VL: dict[str, Any] = {
    "default_theta": 5e5,
    "other_parameters": ("mrope_section", "mrope_interleaved"),
}


def read(name: str, config: HFConfig) -> Architecture:
    more: dict[str, Any] = {}
    if name == _VL:
        config = config.inside("text_config").with_defaults(_VL_DEFAULTS)
        more = ROPE_OF_VL
    else:
        config = config.with_defaults(DEFAULTS)
    bias = config.flag("attention_bias")
    attention = read_attention(
        config,
        default_head_size=128,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=QKNorm(norm=read_norm(config)),
        **more,
    )
    if name == _VL:
        assert attention.rope is not None
        attention = dataclasses.replace(
            attention, rope=with_axes(config, attention.rope, takes_turns=True)
        )
    return read_qwen(name, config, attention)


def _checkpoint(architecture: Architecture) -> CheckpointMap:
    if architecture.name != _VL:
        return LLAMA_NAMES
    return beside_visual(LLAMA_NAMES, architecture.tower, is_inside=True)


FAMILY = Family(
    read=read,
    checkpoint=_checkpoint,
    tiny={
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "head_dim": 32,
    },
    tower=qwen3_vl.read,
    tiny_config_around={
        "architectures": [_VL],
        "model_type": "qwen3_vl",
        "vision_config": qwen3_vl.TINY | {"model_type": "qwen3_vl_vision"},
        **TINY_IMAGE_IDS,
    },
    tiny_preprocessor=TINY_PREPROCESSOR,
    tiny_image_tokens=TINY_IMAGE_TOKENS,
    harmless=AROUND_VISUAL,
)
