"""GLM-4.5, 4.6, 4.7: experts that a sigmoid scores and a shared MLP; the first layers are dense.

A stored bias is added to the scores for the choice alone. Half of each head is rotated, in halves.
GLM-4.5 of 355B has norms of queries and keys. The releases have one more layer, which drafts tokens
if it is asked to; else it is left out.
"""

import dataclasses

from jaxllm.layers.attention import QKNorm
from jaxllm.layers.router import RouterSpec
from jaxllm.models.checkpoint_map import LLAMA_NAMES, CheckpointMap
from jaxllm.models.draft_head import HeadSpec
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
from jaxllm.models.mtp import next_layer
from jaxllm.models.read_moe import TRAINING, read_moe
from jaxllm.models.specs import Architecture

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    attention = read_attention(
        config,
        qkv_bias=config.flag("attention_bias"),
        qk_norm=QKNorm(norm=read_norm(config)) if config.flag("use_qk_norm") else None,
        may_rotate_a_part=True,
        default_share=0.5,
    )
    mlp = read_mlp(config)
    num_shared = config.integer("n_shared_experts", 1)
    moe = read_moe(
        config,
        read_sigmoid_router(config),
        count="n_routed_experts",
        shared=dataclasses.replace(
            mlp, intermediate_size=num_shared * config.integer("moe_intermediate_size")
        ),
    )
    num_dense = config.integer("first_k_dense_replace", 1, lowest=0)
    layers = [
        pre_norm_layer(config, attention, mlp if index < num_dense else moe)
        for index in range(config.integer("num_hidden_layers"))
    ]
    return read_decoder(name, config, layers)


def read_sigmoid_router(config: HFConfig) -> RouterSpec:
    """Read the router of DeepSeek V3, which other families have, too."""
    return RouterSpec(
        scores="sigmoid",
        normalises=config.flag("norm_topk_prob", True),
        scale=config.positive("routed_scaling_factor", 1.0),
        has_selection_bias=True,
        num_groups=config.integer("n_group", 1),
        chosen_groups=config.integer("topk_group", 1),
        in_float32=True,
    )


def _checkpoint(architecture: Architecture) -> CheckpointMap:
    names = LLAMA_NAMES.with_rules(experts=each_expert())
    draft = rf"model\.layers\.{architecture.num_layers}\..*"
    return dataclasses.replace(names, ignored=(*names.ignored, draft))


def _draft_head(architecture: Architecture) -> HeadSpec:
    return next_layer(architecture, _checkpoint(architecture))


FAMILY = Family(
    read=read,
    checkpoint=_checkpoint,
    tiny={
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "num_hidden_layers": 3,
        "head_dim": 24,
        "attention_bias": True,
        "use_qk_norm": True,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
    },
    tiny_gains={"gate": 2.0},
    harmless=TRAINING
    | dict.fromkeys(
        ("num_nextn_predict_layers", "num_mtp_layers"),
        "counts layers behind the decoder, which draft tokens if they are asked to",
    ),
    draft_head=_draft_head,
)
