"""Qwen2, Qwen2.5, and Qwen2.5-VL, which also sees images and videos: Llama with q, k, v biases.

Some layers may have a sliding window. Qwen2.5-VL has the same decoder, with positions on three
axes. Its config has the fields of the decoder inside, or, as releases do, beside those of the
tower.
"""

import dataclasses
from typing import Any

from jaxllm.layers.attention import AttentionSpec
from jaxllm.models.around_decoder import beside_visual
from jaxllm.models.checkpoint_map import LLAMA_NAMES, CheckpointMap
from jaxllm.models.family import (
    FULL,
    SLIDING,
    Family,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_mlp,
    windows_of,
)
from jaxllm.models.harmless import AROUND_VISUAL
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.rope_parameters import with_axes
from jaxllm.models.specs import Architecture
from jaxllm.models.towers import qwen2_5_vl
from jaxllm.models.towers.qwen_patches import (
    TINY_IMAGE_IDS,
    TINY_IMAGE_TOKENS,
    TINY_PREPROCESSOR,
)

# Where its class has other defaults than Llama's.
DEFAULTS = {"num_key_value_heads": 32}
_VL = "Qwen2_5_VLForConditionalGeneration"
_VL_DEFAULTS: dict[str, Any] = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
}


def read(name: str, config: HFConfig) -> Architecture:
    if name == _VL:
        return _read_vl(name, config)
    config = config.with_defaults(DEFAULTS)
    config.must_be("use_mrope", False)
    attention = read_attention(config, qkv_bias=True)
    return read_qwen(name, config, attention)


def _read_vl(name: str, config: HFConfig) -> Architecture:
    text = config if config.get("text_config") is None else config.inside("text_config")
    text = text.with_defaults(_VL_DEFAULTS)
    attention = read_attention(
        text,
        qkv_bias=True,
        default_theta=1e6,
        other_types={"mrope": "default"},
        other_parameters=("mrope_section",),
    )
    assert attention.rope is not None
    rope = with_axes(text, attention.rope)
    return read_qwen(name, text, dataclasses.replace(attention, rope=rope))


def _checkpoint(architecture: Architecture) -> CheckpointMap:
    if architecture.name != _VL:
        return LLAMA_NAMES
    return beside_visual(LLAMA_NAMES, architecture.tower, is_inside=False)


def read_qwen(name: str, config: HFConfig, attention: AttentionSpec) -> Architecture:
    """Read a Qwen with this attention; layers with a window add the window to it."""
    mlp = read_mlp(config)
    layers = [
        pre_norm_layer(config, dataclasses.replace(attention, window=window), mlp)
        for window in read_windows(config)
    ]
    return read_decoder(name, config, layers)


def read_windows(config: HFConfig) -> list[int | None]:
    """The window of every layer; None in layers of full attention."""
    num_layers = config.integer("num_hidden_layers")
    # The first layers have full attention, the rest have the window.
    num_full = config.integer("max_window_layers", 28, lowest=0)
    window, is_used = config.get("sliding_window", 4096), config.flag("use_sliding_window")
    if window is not None:
        window = config.integer("sliding_window", 4096) if is_used else None
    kinds = config.layer_types(num_layers, supported=(FULL, SLIDING))
    if kinds is None:
        return [None if layer < num_full else window for layer in range(num_layers)]
    return windows_of(kinds, window)


FAMILY = Family(
    read=read,
    checkpoint=_checkpoint,
    tiny={
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": True,
    },
    tower=qwen2_5_vl.read,
    tiny_config_around={
        "architectures": [_VL],
        "model_type": "qwen2_5_vl",
        **TINY_IMAGE_IDS,
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            "depth": 3,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 64,
            "tokens_per_second": 2,
        },
    },
    tiny_preprocessor=TINY_PREPROCESSOR,
    tiny_image_tokens=TINY_IMAGE_TOKENS,
    harmless=AROUND_VISUAL,
)
