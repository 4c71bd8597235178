"""EXAONE 4: norms behind attention and MLP, none before them, and norms of queries and keys.

The 32B model has a window in three of four layers. The fourth sees everything, and rotates nothing.
The 1.2B model has no windows, and rotates in every layer.
"""

import dataclasses

from jaxllm.layers.attention import QKNorm
from jaxllm.models.blocks import PostNormBlock
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import (
    FULL,
    SLIDING,
    Family,
    read_attention,
    read_decoder,
    read_mlp,
    read_norm,
    read_window,
    windows_of,
)
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture, LayerSpec

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    norm, mlp = read_norm(config), read_mlp(config)
    rotated = read_attention(config, qk_norm=QKNorm(norm=norm))
    windows = _read_windows(config)
    has_windows = read_window(config) is not None
    layers = [
        LayerSpec(
            mixers=(
                dataclasses.replace(rotated, rope=None)
                if has_windows and window is None
                else dataclasses.replace(rotated, window=window),
            ),
            ffns=(mlp,),
            norm=norm,
            block=PostNormBlock,
        )
        for window in windows
    ]
    return read_decoder(name, config, layers)


def _read_windows(config: HFConfig) -> list[int | None]:
    num_layers, window = config.integer("num_hidden_layers"), read_window(config)
    kinds = config.layer_types(num_layers, supported=(FULL, SLIDING))
    if kinds is None and window is None:
        return [None] * num_layers
    if kinds is None:
        # transformers, too, needs layer_types for a pattern of letters ("LLLG").
        period = config.integer("sliding_window_pattern", 4)
        kinds = [FULL if layer % period == 0 else SLIDING for layer in range(1, num_layers + 1)]
    return windows_of(kinds, window)


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES,
    tiny={
        "architectures": ["Exaone4ForCausalLM"],
        "model_type": "exaone4",
        "head_dim": 24,
        "num_hidden_layers": 3,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
    },
    harmless={"sliding_window_pattern": "says again what layer_types says, if that is there"},
)
