"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and an MLP for all tokens beside them.

The output of that shared MLP is multiplied by the sigmoid of a projection. If windows are used,
every second layer below `max_window_layers` has one.
"""

import dataclasses

from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.expert_tensors import each_expert
from jaxllm.models.families.qwen3_moe import (
    read_router,
    read_sparse_qwen,
    read_used_window,
)
from jaxllm.models.family import FULL, SLIDING, Family, read_attention, read_mlp, windows_of
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_moe import TRAINING, read_moe
from jaxllm.models.specs import Architecture

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "intermediate_size": 5632,
    "qkv_bias": True,
}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    attention = read_attention(config, qkv_bias=config.flag("qkv_bias"))
    size = config.integer("shared_expert_intermediate_size", 5632)
    moe = read_moe(
        config,
        read_router(config),
        shared=dataclasses.replace(read_mlp(config), intermediate_size=size),
        gates_shared=True,
    )
    attentions = [dataclasses.replace(attention, window=window) for window in _windows(config)]
    return read_sparse_qwen(name, config, attentions, moe)


def _windows(config: HFConfig) -> list[int | None]:
    num_layers = config.integer("num_hidden_layers")
    end = config.integer("max_window_layers", 28, lowest=0)
    window = read_used_window(config)
    kinds = config.layer_types(num_layers, supported=(FULL, SLIDING))
    if kinds is None:
        return [window if layer % 2 == 0 and layer < end else None for layer in range(num_layers)]
    return windows_of(kinds, window)


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES.with_rules(experts=each_expert()).with_names(
        shared_experts="shared_expert"
    ),
    tiny={
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_hidden_layers": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
    },
    tiny_gains={"gate": 2.0},
    harmless=TRAINING,
)
