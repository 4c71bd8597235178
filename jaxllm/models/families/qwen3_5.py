"""Qwen3.5, Qwen3.6 and Qwen3.8, also with experts, which also see images and videos.

Decoders are Qwen3-Next with other names in checkpoints, with an MLP or with experts in every layer.
Those beside a tower have positions on three axes, as Qwen3-VL has them. Releases have one more
layer, with attention, which drafts tokens if it is asked to; else it is left out.
"""

import dataclasses
from typing import Any

from jaxllm.errors import UnsupportedModelError
from jaxllm.layers.attention import AttentionSpec
from jaxllm.models.around_decoder import beside_visual, inside_larger_model
from jaxllm.models.checkpoint_map import (
    LLAMA_NAMES,
    CheckpointMap,
    Concat,
    Place,
    Source,
    concatenated,
)
from jaxllm.models.draft_head import HeadSpec
from jaxllm.models.expert_tensors import stacked_experts, stacked_or_each
from jaxllm.models.families import qwen3_next
from jaxllm.models.families.qwen3_next import DRAFTS, read_hybrid, read_shared_moe
from jaxllm.models.family import Family, read_mlp
from jaxllm.models.harmless import AROUND_VISUAL
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.mtp import beside_decoder
from jaxllm.models.read_moe import TRAINING
from jaxllm.models.read_recurrent import taps
from jaxllm.models.rope_parameters import with_axes
from jaxllm.models.specs import Architecture, LayerSpec
from jaxllm.models.towers import qwen3_vl
from jaxllm.models.towers.qwen_patches import (
    TINY_IMAGE_IDS,
    TINY_IMAGE_TOKENS,
    TINY_PREPROCESSOR,
)

_IN_LARGER_MODEL = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
# Of the classes in transformers. The config of a decoder inside a larger model leaves them out.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 248_320,
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
}
_DENSE = {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
_WITH_EXPERTS = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}


def read(name: str, config: HFConfig) -> Architecture:
    is_inside = name in _IN_LARGER_MODEL
    if is_inside:
        config = config.inside("text_config")
    has_experts = name.startswith("Qwen3_5Moe")
    config = config.with_defaults(_DEFAULTS | (_WITH_EXPERTS if has_experts else _DENSE))
    config.must_be("attn_output_gate", True)
    config.must_be("mamba_ssm_dtype", "float32")
    config.must_be("output_gate_type", "swish", "silu")
    if config.get("mlp_only_layers"):
        raise UnsupportedModelError(
            "config.json: mlp_only_layers is not supported: all layers of a Qwen3.5 are alike"
        )
    ffn = read_shared_moe(config, always_normalises=True) if has_experts else read_mlp(config)
    architecture = read_hybrid(name, config, [ffn] * config.integer("num_hidden_layers"))
    return _with_axes(config, architecture) if is_inside else architecture


def _with_axes(config: HFConfig, architecture: Architecture) -> Architecture:
    """The decoder for tokens with positions on three axes."""

    def on_axes(layer: LayerSpec) -> LayerSpec:
        (mixer,) = layer.mixers
        if not isinstance(mixer, AttentionSpec) or mixer.rope is None:
            return layer
        rope = with_axes(config, mixer.rope, takes_turns=True, default_shares=(11, 11, 10))
        return dataclasses.replace(layer, mixers=(dataclasses.replace(mixer, rope=rope),))

    return dataclasses.replace(architecture, layers=tuple(map(on_axes, architecture.layers)))


def _checkpoint(architecture: Architecture) -> CheckpointMap:
    names = _names_of_layers(architecture).ignoring(DRAFTS)
    if architecture.tower is not None:
        return beside_visual(names, architecture.tower, is_inside=True)
    names = names.ignoring(r"model\.visual\..*")
    return inside_larger_model(names) if architecture.name in _IN_LARGER_MODEL else names


def _names_of_layers(architecture: Architecture) -> CheckpointMap:
    names = LLAMA_NAMES.with_rules(
        in_proj_qkvz=_qkvz, in_proj_ba=concatenated("in_proj_b", "in_proj_a"), conv1d=taps
    )
    return stacked_or_each(
        names.with_names(shared_experts="shared_expert"),
        architecture,
        stacked_experts("experts.gate_up_proj", "experts.down_proj"),
        each_first=True,
    )


def _draft_head(architecture: Architecture) -> HeadSpec:
    """The layer is outside the decoder, also where the decoder is inside a larger model."""
    names = _names_of_layers(architecture)
    return beside_decoder(architecture, names, counted_by="mtp_num_hidden_layers")


def _qkvz(place: Place) -> Source:
    *qkv, z = place.pieces
    rows = sum(piece[0] for piece in qkv), *z[1:]
    return Concat((place.tensor("in_proj_qkv", rows), place.tensor("in_proj_z", z)))


FAMILY = Family(
    read=read,
    checkpoint=_checkpoint,
    tiny={
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    tiny_gains=qwen3_next.FAMILY.tiny_gains,
    tower=qwen3_vl.read_without_taps,
    tiny_config_around={
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "vision_config": qwen3_vl.TINY
        | {"model_type": "qwen3_5_vision", "deepstack_visual_indexes": []},
        **TINY_IMAGE_IDS,
    },
    tiny_preprocessor=TINY_PREPROCESSOR,
    tiny_image_tokens=TINY_IMAGE_TOKENS,
    harmless=AROUND_VISUAL
    | TRAINING
    | {"language_model_only": "whether vLLM runs the model without its tower"}
    | dict.fromkeys(
        ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
        "of the layer that drafts tokens if it is asked to",
    ),
    draft_head=_draft_head,
)
