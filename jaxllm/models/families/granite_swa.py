"""Granite with windows: Granite with a sliding window in three of four layers, and sinks in all.

Every head's softmax has the stored logit of one more key, the sink. The base of the rotation may
differ from layer to layer; a base of zero means none.
"""

import dataclasses

from jaxllm.errors import CheckpointError, shown
from jaxllm.layers.rope import RopeConfig
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.families.granite import read_attention_of_granite, read_granite
from jaxllm.models.family import FULL, SLIDING, Family, read_mlp, read_window, windows_of
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "tie_word_embeddings": True,
}
_MAX_THETA = 1e18


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    num_layers = config.integer("num_hidden_layers")
    attention = dataclasses.replace(read_attention_of_granite(config), has_sinks=True)
    assert attention.rope is not None
    kinds = config.layer_types(num_layers, supported=(FULL, SLIDING))
    kinds = kinds or [SLIDING if layer % 4 else FULL for layer in range(num_layers)]
    windows = windows_of(kinds, read_window(config))
    ropes = _read_ropes(config, attention.rope, num_layers)
    attentions = [
        dataclasses.replace(attention, window=window, rope=rope)
        for window, rope in zip(windows, ropes, strict=True)
    ]
    return read_granite(name, config, read_mlp(config, bias=config.flag("mlp_bias")), attentions)


def _read_ropes(config: HFConfig, rope: RopeConfig, num_layers: int) -> list[RopeConfig | None]:
    """The rotation of each layer, which has the base of the layer."""
    thetas = config.get("layer_rope_theta")
    if thetas is None:
        return [rope] * num_layers
    is_list = isinstance(thetas, list) and len(thetas) == num_layers
    if not is_list or not all(
        type(theta) in (int, float) and (theta == 0 or 1 < theta <= _MAX_THETA) for theta in thetas
    ):
        raise CheckpointError(
            f"config.json: layer_rope_theta={shown(thetas)} must be a list of 0 and of numbers "
            f"above 1, one for each of num_hidden_layers={num_layers}"
        )
    return [dataclasses.replace(rope, theta=float(theta)) if theta else None for theta in thetas]


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES,
    tiny={
        "architectures": ["GraniteSWAForCausalLM"],
        "model_type": "granite_swa",
        "num_hidden_layers": 3,
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "embedding_multiplier": 1.5,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.25,
        "layer_rope_theta": [0, 10_000.0, 500.0],
    },
)
