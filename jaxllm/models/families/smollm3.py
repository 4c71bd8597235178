"""SmolLM3: Llama without any rotation in every fourth layer.

Layers without rotation may have a sliding window; the released model has none.
"""

import dataclasses

from jaxllm.errors import CheckpointError, shown
from jaxllm.models.checkpoint_map import LLAMA_NAMES
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
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {"num_key_value_heads": 4, "tie_word_embeddings": True}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, o_bias=bias, default_theta=2e6)
    mlp = read_mlp(config, bias=config.flag("mlp_bias"))
    are_rotated = read_rotated_layers(config)
    layers = [
        pre_norm_layer(
            config,
            dataclasses.replace(
                attention, rope=attention.rope if is_rotated else None, window=window
            ),
            mlp,
        )
        for is_rotated, window in zip(are_rotated, _read_windows(config, are_rotated), strict=True)
    ]
    return read_decoder(name, config, layers)


def read_rotated_layers(config: HFConfig) -> list[bool]:
    """Whether each layer rotates queries and keys. The field's name says the opposite."""
    num_layers = config.integer("num_hidden_layers")
    interval = config.integer("no_rope_layer_interval", 4)
    given = config.get("no_rope_layers")
    if given is None or given == []:
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    is_list = isinstance(given, list | tuple) and all(value in (0, 1) for value in given)
    if not is_list or len(given) < num_layers:
        raise CheckpointError(
            f"config.json: no_rope_layers={shown(given)} must be a list of 0 and 1, one for each "
            f"of num_hidden_layers={num_layers}"
        )
    return [bool(value) for value in given[:num_layers]]


def _read_windows(config: HFConfig, are_rotated: list[bool]) -> list[int | None]:
    window = None
    if config.flag("use_sliding_window") and config.get("sliding_window") is not None:
        window = config.integer("sliding_window")
    kinds = config.layer_types(len(are_rotated), supported=(FULL, SLIDING))
    if kinds is None:
        return [None if is_rotated else window for is_rotated in are_rotated]
    return windows_of(kinds, window)


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES,
    tiny={
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "num_hidden_layers": 3,
        "no_rope_layer_interval": 3,
        "tie_word_embeddings": True,
    },
    harmless={
        "sliding_window": "counts only with use_sliding_window, which is read",
        "max_window_layers": "layer_types and no_rope_layers say which layers have a window",
    },
)
