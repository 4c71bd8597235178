"""DeepSeek V3.2 and GLM-5: DeepSeek V3, for sequences in which sparse attention sees all tokens.

An indexer chooses the tokens that a token attends to, at most `index_topk` of them. A token that
sees no more attends to all, so the indexer has no effect and is left out. Longer sequences are
refused.
"""

import dataclasses
from typing import Any

from jaxllm.errors import UnsupportedModelError
from jaxllm.models.checkpoint_map import CheckpointMap
from jaxllm.models.families import deepseek_v3
from jaxllm.models.families.deepseek_v3 import HARMLESS, TINY, TINY_GAINS, YARN, read_with_experts
from jaxllm.models.families.glm4_moe import read_sigmoid_router
from jaxllm.models.families.glm4_moe_lite import with_dense_layers
from jaxllm.models.family import Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_latent_attention import read_latent_attention
from jaxllm.models.specs import Architecture

# Of the classes in transformers, where they are not those that most families share.
_DEFAULTS: dict[str, Any] = {
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
}
_DEFAULTS_OF = {
    "DeepseekV32ForCausalLM": {
        "num_key_value_heads": 128,
        "intermediate_size": 18_432,
        "n_group": 8,
        "topk_group": 4,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "max_position_embeddings": 163_840,
    },
    "GlmMoeDsaForCausalLM": {
        "num_key_value_heads": 64,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 12_288,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "max_position_embeddings": 202_752,
    },
}


def read(name: str, config: HFConfig) -> Architecture:
    config = with_dense_layers(config.with_defaults(_DEFAULTS | _DEFAULTS_OF[name]))
    config.must_be("scoring_func", "sigmoid")
    config.must_be("topk_method", "noaux_tc")
    config.must_be("moe_layer_freq", 1)
    config.must_be("mlp_bias", False)
    config.must_be("rope_interleave", True)
    most = config.integer("index_topk")
    architecture = read_with_experts(
        name, config, read_latent_attention(config), read_sigmoid_router(config)
    )
    if (config.max_model_len or architecture.max_model_len) > most:
        raise UnsupportedModelError(
            f"sparse attention is not supported: beyond index_topk={most} tokens the model attends "
            f"to a choice of them; set max_model_len to at most {most}, where it attends to all"
        )
    return dataclasses.replace(architecture, max_model_len=min(most, architecture.max_model_len))


def _checkpoint(architecture: Architecture) -> CheckpointMap:
    names = deepseek_v3.checkpoint(architecture)
    return dataclasses.replace(names, ignored=(*names.ignored, r".*\.self_attn\.indexer\..*"))


FAMILY = Family(
    read=read,
    checkpoint=_checkpoint,
    tiny={
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        **TINY,
        "max_position_embeddings": 256,
        "index_topk": 256,
        "rope_theta": None,
        "rope_parameters": YARN,
    },
    tiny_gains=TINY_GAINS,
    harmless=HARMLESS
    | dict.fromkeys(
        (
            "layer_types",
            "index_head_dim",
            "index_n_heads",
            "indexer_types",
            "index_topk_freq",
            "index_topk_pattern",
            "index_skip_topk_offset",
            "indexer_rope_interleave",
            "index_share_for_mtp_iteration",
        ),
        "describes how tokens are chosen; all are, in sequences that are not refused",
    ),
)
