"""Gemma 3: Gemma 2 with norms of queries and keys in place of soft caps, and two rotations.

Five layers have a window and rotate with a short base; the sixth sees everything, with a long base
that may be scaled. In models that also see images, the tokens of an image see each other.
"""

import dataclasses
from typing import Any

from jaxllm.layers.attention import AttentionSpec, QKNorm
from jaxllm.models.around_decoder import beside_vision_tower, inside_larger_model
from jaxllm.models.blocks import SandwichBlock
from jaxllm.models.checkpoint_map import LLAMA_NAMES, CheckpointMap
from jaxllm.models.families import gemma2
from jaxllm.models.family import (
    FULL,
    SLIDING,
    Family,
    read_attention,
    read_mlp,
    read_window,
)
from jaxllm.models.harmless import AROUND_DECODER
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture, LayerSpec
from jaxllm.models.towers import siglip

_IN_LARGER_MODEL = "Gemma3ForConditionalGeneration"
_DEFAULTS = gemma2.DEFAULTS | {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}


def read(name: str, config: HFConfig) -> Architecture:
    if name == _IN_LARGER_MODEL:
        config = config.inside("text_config")
        # transformers ignores a cap here, which others apply. Releases have none.
        config.must_be("final_logit_softcapping")
    config = config.with_defaults(_DEFAULTS)
    gemma2.refuse_bidirectional(config)
    mlp = read_mlp(config, activation="hidden_activation")
    layers = [
        LayerSpec(
            mixers=(_read_attention(config, kind),),
            ffns=(mlp,),
            norm=gemma2.read_norm(config),
            block=SandwichBlock,
        )
        for kind in _read_layer_types(config)
    ]
    architecture = gemma2.read_gemma(name, config, layers)
    # The length contains the factor by which the rotation is stretched.
    longest = config.integer("max_position_embeddings")
    return dataclasses.replace(architecture, max_model_len=longest)


def _read_attention(config: HFConfig, kind: str) -> AttentionSpec:
    bias = config.flag("attention_bias")
    if kind == FULL:
        rope: dict[str, Any] = {"default_theta": 1e6}
    else:
        rope = {"default_theta": 1e4, "is_scaled": False, "theta_field": "rope_local_base_freq"}
    attention = read_attention(
        config,
        default_head_size=256,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=QKNorm(norm=gemma2.read_norm(config)),
        layer_type=kind,
        **rope,
    )
    window = read_window(config)
    return dataclasses.replace(
        attention,
        scale=config.positive("query_pre_attn_scalar", 256) ** -0.5,
        window=window if kind == SLIDING else None,
    )


def _read_layer_types(config: HFConfig) -> list[str]:
    # The second name is transformers' own note; it comes with a list of types.
    pattern = config.integer("sliding_window_pattern", 6)
    config.get("_sliding_window_pattern")
    return gemma2.read_layer_types(config, pattern=pattern)


def _checkpoint(architecture: Architecture) -> CheckpointMap:
    if architecture.name != _IN_LARGER_MODEL:
        return LLAMA_NAMES
    if architecture.tower is None:
        return inside_larger_model(LLAMA_NAMES)
    return beside_vision_tower(LLAMA_NAMES, architecture.tower)


FAMILY = Family(
    read=read,
    checkpoint=_checkpoint,
    tiny={
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 24,
        "query_pre_attn_scalar": 40,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
        "rope_theta": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "tie_word_embeddings": True,
        "num_hidden_layers": 4,
    },
    tower=siglip.read,
    tiny_config_around={
        "architectures": [_IN_LARGER_MODEL],
        "model_type": "gemma3",
        "image_token_index": 3,
        "boi_token_index": 4,
        "eoi_token_index": 5,
        "mm_tokens_per_image": 16,
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 4,
            "image_size": 32,
        },
    },
    tiny_preprocessor={
        "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": "Gemma3Processor",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": None,
        "do_pan_and_scan": None,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_seq_length": 16,
        "rescale_factor": 0.00392156862745098,
        "resample": 2,
        "size": {"height": 32, "width": 32},
    },
    tiny_image_tokens=("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    harmless={
        "attn_logit_softcapping": "the class in transformers does not apply it either",
        "boi_token_index": "the processor's tokens around an image have names",
        "eoi_token_index": "the processor's tokens around an image have names",
        "vision_use_head": "makes one vector of an image, which the decoder does not read",
    }
    | AROUND_DECODER,
)
