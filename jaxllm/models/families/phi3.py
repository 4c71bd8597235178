"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections in the checkpoint, and LongRoPE.

Phi-3 mini and small contexts have a window in every layer. Phi-4-mini rotates three quarters of
each head, and ties its embeddings.
"""

import dataclasses

from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import (
    Family,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_mlp,
    read_window,
)
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
# Early files call LongRoPE by these names.
_OTHER_TYPES = {"su": "longrope", "yarn": "longrope"}
# [q; k; v] and [gate; up] are one tensor each, as in our modules.
_NAMES = dataclasses.replace(LLAMA_NAMES, rules={})


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    for other_design in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.must_be(other_design, False)
    for other_design in ("full_attn_mod", "interpolate_factor"):
        config.must_be(other_design, 1)
    attention = dataclasses.replace(
        read_attention(config, may_rotate_a_part=True, other_types=_OTHER_TYPES),
        window=read_window(config),
    )
    layer = pre_norm_layer(config, attention, read_mlp(config))
    return read_decoder(name, config, [layer] * config.integer("num_hidden_layers"))


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: _NAMES,
    tiny={
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "sliding_window": 9,
        "original_max_position_embeddings": 2048,
    },
)
