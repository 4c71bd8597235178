"""Command R, R+ and Aya: attention and MLP side by side behind one norm.

Neighbours are rotated in pairs, not the halves of a head. The norm is a LayerNorm without a bias.
The logits are multiplied by `logit_scale`, and the head is the embedding. Command R+ of August 2024
has norms of queries and keys with a weight for each head.
"""

import dataclasses

from jaxllm.layers.attention import AttentionSpec, QKNorm
from jaxllm.layers.norm import LayerNormSpec
from jaxllm.models.blocks import ParallelBlock
from jaxllm.models.checkpoint_map import (
    LLAMA_NAMES,
    CheckpointMap,
    InHalves,
    Place,
    Source,
    ViewedAs,
    rotated_in_pairs,
)
from jaxllm.models.family import Family, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture, LayerSpec


def read(name: str, config: HFConfig) -> Architecture:
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, o_bias=bias, default_theta=500_000.0)
    if config.flag("use_qk_norm"):
        norm = QKNorm(norm=read_norm(config), has_weight_per_head=True)
        attention = dataclasses.replace(attention, qk_norm=norm)
    return read_cohere(name, config, [attention] * config.integer("num_hidden_layers"))


def read_cohere(name: str, config: HFConfig, attentions: list[AttentionSpec]) -> Architecture:
    """Read a model whose layers have these attentions."""
    norm, mlp = read_norm(config), read_mlp(config)
    layers = [
        LayerSpec(mixers=(attention,), ffns=(mlp,), norm=norm, block=ParallelBlock)
        for attention in attentions
    ]
    architecture = read_decoder(
        name,
        config,
        layers,
        is_tied_by_default=True,
        logits_scale=config.positive("logit_scale", 0.0625),
    )
    # Command R was trained on longer sequences than max_position_embeddings says.
    longest = config.integer("model_max_length", architecture.max_model_len)
    return dataclasses.replace(architecture, max_model_len=longest)


def read_norm(config: HFConfig) -> LayerNormSpec:
    return LayerNormSpec(eps=config.positive("layer_norm_eps", 1e-5), has_bias=False)


def checkpoint(architecture: Architecture) -> CheckpointMap:
    (attention,) = architecture.layers[0].mixers
    assert isinstance(attention, AttentionSpec)
    size = attention.head_size

    def norm_in_halves(place: Place) -> Source:
        # The weights of a norm of queries or keys are in the order of what it normalises.
        ((heads, _),) = place.pieces
        tensor = place.tensor(place.module, (heads, size))
        in_line = InHalves(ViewedAs(tensor, (heads * size,)), size, rotated=size)
        return ViewedAs(in_line, (heads, size))

    return LLAMA_NAMES.with_rules(
        qkv_proj=rotated_in_pairs(size, rotated=size),
        q_norm=norm_in_halves,
        k_norm=norm_in_halves,
    )


FAMILY = Family(
    read=read,
    checkpoint=checkpoint,
    tiny={
        "architectures": ["CohereForCausalLM"],
        "model_type": "cohere",
        "rms_norm_eps": None,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.8,
        "tie_word_embeddings": True,
    },
)
