"""GLM-4.7-Flash: the experts of GLM-4.5, with the latent attention of DeepSeek V3.

The releases have one more layer, which drafts tokens if it is asked to; else it is left out.
"""

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.models.families.deepseek_v3 import (
    HARMLESS,
    TINY,
    TINY_GAINS,
    checkpoint,
    draft_head,
    read_with_experts,
)
from jaxllm.models.families.glm4_moe import read_sigmoid_router
from jaxllm.models.family import Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_latent_attention import read_latent_attention
from jaxllm.models.specs import Architecture

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {
    "num_key_value_heads": 20,
    "rms_norm_eps": 1e-5,
    "intermediate_size": 10_240,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "max_position_embeddings": 202_752,
}


def read(name: str, config: HFConfig) -> Architecture:
    config = with_dense_layers(config.with_defaults(_DEFAULTS))
    config.must_be("topk_method", "noaux_tc")
    return read_with_experts(
        name, config, read_latent_attention(config), read_sigmoid_router(config)
    )


def with_dense_layers(config: HFConfig) -> HFConfig:
    """The config with the number of its first, dense layers, which it may have as a list of types
    of all layers."""
    kinds = config.names("mlp_layer_types")
    if kinds is None:
        return config
    num_layers, num_dense = config.integer("num_hidden_layers"), kinds.count("dense")
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"config.json: mlp_layer_types has {len(kinds)} entries for "
            f"num_hidden_layers={num_layers}"
        )
    if kinds != ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
        raise UnsupportedModelError(
            f"config.json: mlp_layer_types={shown(kinds)} is not supported; supported are 'dense' "
            "layers before all 'sparse' ones"
        )
    return config.replaced({"first_k_dense_replace": num_dense})


FAMILY = Family(
    read=read,
    checkpoint=checkpoint,
    tiny={
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        **TINY,
        "first_k_dense_replace": None,
        "n_group": 1,
        "topk_group": 1,
    },
    tiny_gains=TINY_GAINS,
    harmless=HARMLESS,
    draft_head=draft_head,
)
