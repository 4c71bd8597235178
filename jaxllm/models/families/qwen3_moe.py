"""Qwen3-MoE, Qwen3-Coder, and Qwen3-VL with experts, which also sees images and videos.

They are Qwen3 with experts in place of the MLPs of most layers. `mlp_only_layers` and
`decoder_sparse_step` say which layers keep an MLP. If there is a window, all layers have it.
Qwen3-VL has positions on three axes, and releases have all experts of a layer in two tensors.
"""

import dataclasses
from typing import Any

from jaxllm.layers.attention import AttentionSpec, QKNorm
from jaxllm.layers.moe import MoESpec
from jaxllm.layers.router import RouterSpec
from jaxllm.models.around_decoder import beside_visual
from jaxllm.models.checkpoint_map import LLAMA_NAMES, CheckpointMap
from jaxllm.models.expert_tensors import each_expert, stacked_experts
from jaxllm.models.families.qwen3 import ROPE_OF_VL
from jaxllm.models.family import (
    Family,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_mlp,
    read_norm,
)
from jaxllm.models.harmless import AROUND_VISUAL
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_moe import TRAINING, read_moe, read_numbers
from jaxllm.models.rope_parameters import with_axes
from jaxllm.models.specs import Architecture
from jaxllm.models.towers import qwen3_vl
from jaxllm.models.towers.qwen_patches import (
    TINY_IMAGE_IDS,
    TINY_IMAGE_TOKENS,
    TINY_PREPROCESSOR,
)

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
}
_VL = "Qwen3VLMoeForConditionalGeneration"
# Likewise. The config of a decoder inside a larger model leaves them out.
_VL_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128_000,
    "num_experts": 60,
    "num_local_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "sliding_window": None,
}


def read(name: str, config: HFConfig) -> Architecture:
    sees_images = name == _VL
    if sees_images:
        config = config.inside("text_config").with_defaults(_VL_DEFAULTS)
        config.must_be("norm_topk_prob", True)
    else:
        config = config.with_defaults(_DEFAULTS)
    # transformers 5 writes another name.
    config = config.where(num_experts="num_local_experts")
    # Qwen3-Coder says so.
    config.must_be("use_qk_norm", True)
    config.must_be("qkv_bias", False)
    config.must_be("shared_expert_intermediate_size", 0)
    bias = config.flag("attention_bias")
    attention = read_attention(
        config,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=QKNorm(norm=read_norm(config)),
        **(ROPE_OF_VL if sees_images else {}),
    )
    if sees_images:
        assert attention.rope is not None
        rope = with_axes(config, attention.rope, takes_turns=True)
        attention = dataclasses.replace(attention, rope=rope)
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


def _checkpoint(architecture: Architecture) -> CheckpointMap:
    names = LLAMA_NAMES.with_rules(experts=each_expert())
    if architecture.name != _VL:
        return names
    if architecture.num_experts:
        names = _in_two_tensors(names, architecture)
    return beside_visual(names, architecture.tower, is_inside=True)


def _in_two_tensors(names: CheckpointMap, architecture: Architecture) -> CheckpointMap:
    """The map for checkpoints that have all experts of a layer in two tensors, with axes in the
    order of releases or in that in which transformers 5 writes them, or each expert in its own."""
    layer = min(architecture.num_experts)
    (moe,) = architecture.layers[layer].ffns
    assert isinstance(moe, MoESpec), moe
    told = f"model.layers.{layer}.mlp.experts.w2_weight"
    names = dataclasses.replace(names, told_by=(*names.told_by, told))

    def stacked(size: int, other: int, *, is_transposed: bool) -> CheckpointMap:
        rule = stacked_experts(
            "experts.gate_up_proj", "experts.down_proj", is_transposed=is_transposed
        )
        shapes = {told: (moe.num_experts, size, other)}
        return dataclasses.replace(names.with_rules(experts=rule), told_shapes=shapes)

    size, other = moe.intermediate_size, architecture.hidden_size
    written = stacked(other, size, is_transposed=False)
    released = stacked(size, other, is_transposed=True)
    return dataclasses.replace(released, others=(written, names))


FAMILY = Family(
    read=read,
    checkpoint=_checkpoint,
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
    tower=qwen3_vl.read,
    tiny_config_around={
        "architectures": [_VL],
        "model_type": "qwen3_vl_moe",
        "vision_config": qwen3_vl.TINY | {"model_type": "qwen3_vl_moe_vision"},
        **TINY_IMAGE_IDS,
    },
    tiny_preprocessor=TINY_PREPROCESSOR,
    tiny_image_tokens=TINY_IMAGE_TOKENS,
    harmless=TRAINING
    | AROUND_VISUAL
    | {"max_window_layers": "the layers of a Qwen with experts have the window, or none has it"},
)
