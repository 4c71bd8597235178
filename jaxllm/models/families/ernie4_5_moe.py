"""ERNIE 4.5 with experts: ERNIE 4.5 with experts and a shared MLP in all layers but the first.

Scores are a softmax of float32 logits. A stored bias is added to them for the choice alone. The
factors are divided by their sum, which counts as `moe_norm_min` at least.
"""

import dataclasses

from jaxllm.layers.router import RouterSpec
from jaxllm.models.checkpoint_map import LLAMA_NAMES, CheckpointMap
from jaxllm.models.expert_tensors import each_expert, router_with_bias_at
from jaxllm.models.family import (
    Family,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_mlp,
    with_rotated_pairs,
)
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_moe import TRAINING, read_moe
from jaxllm.models.specs import Architecture

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 1536,
    "moe_num_experts": 64,
    "moe_k": 6,
}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    config.must_be("use_bias", False)
    config.must_be("moe_gate", "topk")
    config.must_be("moe_use_aux_free", True)
    config.must_be("use_rmsnorm", True)
    config.must_be("compression_ratio", 1)
    mlp = read_mlp(config)
    num_shared = config.integer("moe_num_shared_experts", 2, lowest=0)
    size = num_shared * config.integer("moe_intermediate_size")
    router = RouterSpec(
        scores="softmax",
        normalises=True,
        least_sum=config.positive("moe_norm_min", 1e-12),
        has_selection_bias=True,
        in_float32=True,
        rounds_factors=True,
    )
    moe = read_moe(
        config,
        router,
        count="moe_num_experts",
        choices="moe_k",
        shared=dataclasses.replace(mlp, intermediate_size=size) if num_shared else None,
    )
    attention = read_attention(config, default_theta=500_000.0)
    layers = [
        pre_norm_layer(config, attention, moe if is_sparse else mlp)
        for is_sparse in _sparse_layers(config)
    ]
    return read_decoder(name, config, layers)


def _sparse_layers(config: HFConfig) -> list[bool]:
    """Whether each layer has experts."""
    num_layers = config.integer("num_hidden_layers")
    first = config.integer("moe_layer_start_index", 1, lowest=0)
    last = config.integer("moe_layer_end_index", -1, lowest=-1)
    step = config.integer("moe_layer_interval", 1)
    last = num_layers - 1 if last == -1 else last
    return [first <= index <= last and (index + 1) % step == 0 for index in range(num_layers)]


def _checkpoint(architecture: Architecture) -> CheckpointMap:
    names = with_rotated_pairs(LLAMA_NAMES, architecture).with_rules(
        experts=each_expert(),
        gate=router_with_bias_at("moe_statics.e_score_correction_bias", is_row=True),
    )
    return dataclasses.replace(names, ignored=(*names.ignored, r"model\.mtp_.*"))


FAMILY = Family(
    read=read,
    checkpoint=_checkpoint,
    tiny={
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "model_type": "ernie4_5_moe",
        "num_hidden_layers": 3,
        "head_dim": 24,
        "tie_word_embeddings": True,
        "moe_intermediate_size": 32,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
        "moe_layer_interval": 1,
    },
    tiny_gains={"gate": 2.0},
    harmless=TRAINING
    | {
        "moe_capacity": "limits the tokens of an expert in training; here all are computed",
        "num_nextn_predict_layers": "counts layers that draft tokens, which are left out",
        "moe_dropout_prob": "acts in training only",
        **dict.fromkeys(
            ("fuse_rope", "use_recompute_moe", "moe_multimodal_dispatch_use_allgather"),
            "how the training software computes, not what",
        ),
        "weight_share_add_bias": "counts only with use_bias, which is refused",
    },
)
