"""Qwen3-MoE and Qwen3-Coder: Qwen3 with experts in place of the MLPs of most layers.

`mlp_only_layers` and `decoder_sparse_step` say which layers keep an MLP. If there is a window, all
layers have it.
"""

import dataclasses

from jaxllm.layers.attention import AttentionSpec, QKNorm
from jaxllm.layers.moe import MoESpec
from jaxllm.layers.router import RouterSpec
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.expert_tensors import each_expert
from jaxllm.models.family import (
    Family,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_mlp,
    read_norm,
)
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_moe import TRAINING, read_moe, read_numbers
from jaxllm.models.specs import Architecture

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
}


def read(name: str, config: HFConfig) -> Architecture:
    # transformers 5 writes another name.
    config = config.with_defaults(_DEFAULTS).where(num_experts="num_local_experts")
    # Qwen3-Coder says so.
    config.must_be("use_qk_norm", True)
    config.must_be("qkv_bias", False)
    config.must_be("shared_expert_intermediate_size", 0)
    bias = config.flag("attention_bias")
    attention = read_attention(
        config, qkv_bias=bias, o_bias=bias, qk_norm=QKNorm(norm=read_norm(config))
    )
    attention = dataclasses.replace(attention, window=read_used_window(config))
    attentions = [attention] * config.integer("num_hidden_layers")
    return read_sparse_qwen(name, config, attentions, read_moe(config, read_router(config)))


def read_used_window(config: HFConfig) -> int | None:
    """The window, unless the config says that it is not used."""
    is_used = config.flag("use_sliding_window")
    if config.get("sliding_window", 4096) is None or not is_used:
        return None
    return config.integer("sliding_window", 4096)


def read_router(config: HFConfig) -> RouterSpec:
    return RouterSpec(
        scores="softmax", normalises=config.flag("norm_topk_prob"), rounds_factors=True
    )


def read_sparse_qwen(
    name: str, config: HFConfig, attentions: list[AttentionSpec], moe: MoESpec
) -> Architecture:
    """Read a Qwen with these attentions, and experts in the layers that the config says."""
    step = config.integer("decoder_sparse_step", 1)
    dense = read_numbers(config, "mlp_only_layers")
    mlp = read_mlp(config)
    layers = [
        pre_norm_layer(config, attention, mlp if index in dense or (index + 1) % step else moe)
        for index, attention in enumerate(attentions)
    ]
    return read_decoder(name, config, layers)


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES.with_rules(experts=each_expert()),
    tiny={
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 24,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    tiny_gains={"gate": 2.0},
    harmless=TRAINING
    | {"max_window_layers": "the layers of a Qwen with experts have the window, or none has it"},
)
