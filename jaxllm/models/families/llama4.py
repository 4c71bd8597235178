"""Llama 4: experts and chunked attention, with layers between that see all and do not rotate.

Layers that rotate neighbours see only the tokens of their own chunk; they may normalise queries and
keys after the rotation, without a weight. In the others queries grow with their position. A token's
expert gets its input multiplied by the sigmoid of the router's logit, and an MLP for all tokens is
beside it. Maverick has experts in every second layer only. The decoder is read without the tower
that sees images.
"""

import dataclasses
from typing import Any

from jaxllm.layers.attention import AttentionSpec, QKNorm, Temperature
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.layers.router import RouterSpec
from jaxllm.models.around_decoder import inside_larger_model
from jaxllm.models.checkpoint_map import LLAMA_NAMES, CheckpointMap
from jaxllm.models.expert_tensors import stacked_experts, stacked_or_each
from jaxllm.models.families.smollm3 import read_rotated_layers
from jaxllm.models.family import (
    FULL,
    Family,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_mlp,
    with_rotated_pairs,
)
from jaxllm.models.harmless import AROUND_DECODER
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_moe import TRAINING, read_moe, read_numbers
from jaxllm.models.specs import Architecture

_CHUNKED = "chunked_attention"
_IN_LARGER_MODEL = "Llama4ForConditionalGeneration"
# Of the class in transformers. The config of a decoder inside a larger model leaves them out.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
}
_NAMES = LLAMA_NAMES.with_names(mlp="feed_forward", gate="router", shared_experts="shared_expert")


def read(name: str, config: HFConfig) -> Architecture:
    if name == _IN_LARGER_MODEL:
        config = config.inside("text_config")
    config = config.with_defaults(_DEFAULTS)
    attentions = _read_attentions(config)
    mlp = read_mlp(config)
    dense = dataclasses.replace(mlp, intermediate_size=config.integer("intermediate_size_mlp"))
    moe = read_moe(
        config,
        RouterSpec(scores="sigmoid", rounds_factors=True),
        count="num_local_experts",
        size="intermediate_size",
        shared=mlp,
    )
    moe = dataclasses.replace(
        moe, activation=dataclasses.replace(moe.activation, scales_input=True)
    )
    sparse_layers = _read_sparse_layers(config)
    layers = [
        pre_norm_layer(config, attention, moe if index in sparse_layers else dense)
        for index, attention in enumerate(attentions)
    ]
    return read_decoder(name, config, layers)


def _read_attentions(config: HFConfig) -> list[AttentionSpec]:
    """The attention of each layer."""
    bias = config.flag("attention_bias")
    plain = read_attention(config, qkv_bias=bias, o_bias=bias, default_theta=500_000.0)
    norm = RMSNormSpec(eps=config.positive("rms_norm_eps", 1e-5), has_weight=False)
    qk_norm = QKNorm(norm=norm, after_rope=True) if config.flag("use_qk_norm", True) else None
    rotated = dataclasses.replace(plain, qk_norm=qk_norm)
    unrotated = dataclasses.replace(plain, rope=None, temperature=_read_temperature(config))
    are_rotated = read_rotated_layers(config)
    chunk = None
    if config.get("attention_chunk_size", 8192) is not None:
        chunk = config.integer("attention_chunk_size", 8192)
    kinds = config.layer_types(len(are_rotated), supported=(FULL, _CHUNKED))
    are_chunked = [kind == _CHUNKED for kind in kinds] if kinds else are_rotated
    return [
        dataclasses.replace(rotated if rotates else unrotated, chunk=chunk if is_chunked else None)
        for rotates, is_chunked in zip(are_rotated, are_chunked, strict=True)
    ]


def _read_temperature(config: HFConfig) -> Temperature | None:
    # The first releases have a number in place of true.
    config.must_be("attn_temperature_tuning", True, False, 4)
    temperature = Temperature(
        strength=config.positive("attn_scale", 0.1),
        interval=config.integer("floor_scale", 8192),
        first=1,
    )
    return temperature if config.get("attn_temperature_tuning", True) else None


def _read_sparse_layers(config: HFConfig) -> set[int]:
    """The layers with experts."""
    num_layers = config.integer("num_hidden_layers")
    step = config.integer("interleave_moe_layer_step", 1)
    if config.get("moe_layers") is None:
        return set(range(step - 1, num_layers, step))
    return set(read_numbers(config, "moe_layers"))


def _checkpoint(architecture: Architecture) -> CheckpointMap:
    names = stacked_or_each(
        with_rotated_pairs(_NAMES, architecture),
        architecture,
        stacked_experts("experts.gate_up_proj", "experts.down_proj", is_transposed=True),
    )
    return inside_larger_model(names) if architecture.name == _IN_LARGER_MODEL else names


FAMILY = Family(
    read=read,
    checkpoint=_checkpoint,
    tiny={
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "num_hidden_layers": 3,
        "head_dim": 24,
        "intermediate_size": 48,
        "intermediate_size_mlp": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 3,
        "attention_chunk_size": 16,
        "floor_scale": 8,
        "attn_scale": 0.3,
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    tiny_gains={"router": 2.0},
    harmless=TRAINING
    | AROUND_DECODER
    | {
        "no_rope_layer_interval": "no_rope_layers says it for each layer",
        "interleave_moe_layer_step": "moe_layers says it for each layer",
        "for_llm_compression": "was used while the weights were quantised",
    },
)
