"""Granite 4: Mamba2 in most layers and attention in a few, with experts and a shared MLP, or dense.

Most of them do not rotate. The multipliers are Granite's. The dense ones have the shared MLP alone,
and may have attention in all layers.
"""

import dataclasses

from jaxllm.layers.mamba import GatedNormSpec
from jaxllm.layers.moe import MoESpec
from jaxllm.layers.router import RouterSpec
from jaxllm.models.checkpoint_map import LLAMA_NAMES, CheckpointMap, Place, Source, as_named
from jaxllm.models.expert_tensors import stacked_experts
from jaxllm.models.families.granite import read_attention_of_granite, read_granite
from jaxllm.models.family import Family, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_moe import TRAINING, read_moe
from jaxllm.models.read_recurrent import MAMBA_HARMLESS, read_kinds, read_mamba, taps
from jaxllm.models.specs import Architecture, FFNSpec

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {"max_position_embeddings": 2048}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS).where(layer_types="layers_block_type")
    config.must_be("position_embedding_type", "nope", "rope")
    config.must_be("normalization_function", "rmsnorm")
    attention = read_attention_of_granite(config)
    if config.get("position_embedding_type") != "rope":
        attention = dataclasses.replace(attention, rope=None)
    mamba = read_mamba(config, GatedNormSpec(eps=config.positive("rms_norm_eps", 1e-6)))
    kinds = read_kinds(config) or [True] * config.integer("num_hidden_layers")
    mixers = [mamba if is_recurrent else attention for is_recurrent in kinds]
    return read_granite(name, config, _read_ffn(config), mixers)


def _read_ffn(config: HFConfig) -> FFNSpec:
    shared = config.replaced(
        {"intermediate_size": config.integer("shared_intermediate_size", 1024)}
    )
    mlp = read_mlp(shared)
    if config.integer("num_local_experts", 8, lowest=0) == 0:
        return mlp
    return read_moe(
        config,
        RouterSpec(scores="softmax of chosen", rounds_factors=True),
        count="num_local_experts",
        default_count=8,
        default_choices=2,
        size="intermediate_size",
        default_size=11_008,
        shared=mlp,
    )


def _checkpoint(architecture: Architecture) -> CheckpointMap:
    names = LLAMA_NAMES.with_rules(conv1d=taps, gate_up_proj=_input_linear).with_names(
        down_proj="output_linear"
    )
    has_experts = any(isinstance(ffn, MoESpec) for ffn in architecture.layers[0].ffns)
    if not has_experts:
        return names.with_names(mlp="shared_mlp")
    moe = "block_sparse_moe"
    experts = stacked_experts(f"{moe}.input_linear.weight", f"{moe}.output_linear.weight")
    return names.with_rules(experts=experts).with_names(
        mlp="", gate=f"{moe}.router.layer", shared_experts="shared_mlp"
    )


def _input_linear(place: Place) -> Source:
    return as_named(place._replace(module="input_linear"))


FAMILY = Family(
    read=read,
    checkpoint=_checkpoint,
    tiny={
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "position_embedding_type": "nope",
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 24,
        "tie_word_embeddings": True,
        "intermediate_size": 48,
        "shared_intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "embedding_multiplier": 1.5,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.25,
    },
    tiny_gains={"layer": 2.0, "input_linear": 1.5, "output_linear": 1.5, "mamba": -1.0},
    harmless=TRAINING
    | MAMBA_HARMLESS
    | dict.fromkeys(
        ("intermediate_size", "num_experts_per_tok"), "of experts; read where there are some"
    )
    | {"init_method": "acts in training only: how weights begin"},
)
