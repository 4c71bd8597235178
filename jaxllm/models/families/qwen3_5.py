"""Qwen3.5, Qwen3.6 and Qwen3.8, also with experts: the decoders of models that also see images.

They are Qwen3-Next with other names in checkpoints, with an MLP or with experts in every layer. A
decoder is read without its tower, and without the layers that draft tokens.
"""

import dataclasses
from typing import Any

from jaxllm.errors import UnsupportedModelError
from jaxllm.models.around_decoder import inside_larger_model
from jaxllm.models.checkpoint_map import (
    LLAMA_NAMES,
    CheckpointMap,
    Concat,
    Place,
    Source,
    concatenated,
)
from jaxllm.models.expert_tensors import each_expert, stacked_experts
from jaxllm.models.families import qwen3_next
from jaxllm.models.families.qwen3_next import DRAFTS, read_hybrid, read_shared_moe
from jaxllm.models.family import Family, read_mlp
from jaxllm.models.harmless import AROUND_DECODER
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_moe import TRAINING
from jaxllm.models.read_recurrent import taps
from jaxllm.models.specs import Architecture

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
    if name in _IN_LARGER_MODEL:
        config = config.inside("text_config")
    has_experts = name.startswith("Qwen3_5Moe")
    config = config.with_defaults(_DEFAULTS | (_WITH_EXPERTS if has_experts else _DENSE))
    config.must_be("attn_output_gate", True)
    config.must_be("mamba_ssm_dtype", "float32")
    if config.get("mlp_only_layers"):
        raise UnsupportedModelError(
            "config.json: mlp_only_layers is not supported: all layers of a Qwen3.5 are alike"
        )
    ffn = read_shared_moe(config, always_normalises=True) if has_experts else read_mlp(config)
    return read_hybrid(name, config, [ffn] * config.integer("num_hidden_layers"))


def _checkpoint(architecture: Architecture) -> CheckpointMap:
    names = LLAMA_NAMES.with_rules(
        in_proj_qkvz=_qkvz, in_proj_ba=concatenated("in_proj_b", "in_proj_a"), conv1d=taps
    ).ignoring(DRAFTS, r"model\.visual\..*")
    if architecture.name.startswith("Qwen3_5Moe"):
        names = _with_experts(names)
    return inside_larger_model(names) if architecture.name in _IN_LARGER_MODEL else names


def _qkvz(place: Place) -> Source:
    *qkv, z = place.pieces
    rows = sum(piece[0] for piece in qkv), *z[1:]
    return Concat((place.tensor("in_proj_qkv", rows), place.tensor("in_proj_z", z)))


def _with_experts(names: CheckpointMap) -> CheckpointMap:
    """The map for experts in tensors of their own, or all of a layer in two, as in releases."""
    names = dataclasses.replace(
        names.with_names(shared_experts="shared_expert"),
        told_by=(*names.told_by, "model.layers.0.mlp.experts.w2_weight"),
    )
    each, stacked = (
        names.with_rules(experts=rule)
        for rule in (each_expert(), stacked_experts("experts.gate_up_proj", "experts.down_proj"))
    )
    return dataclasses.replace(each, others=(stacked,))


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
    harmless=AROUND_DECODER
    | TRAINING
    | dict.fromkeys(
        ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
        "of layers behind the decoder, which draft tokens and are left out",
    ),
)
