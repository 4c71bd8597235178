"""DeepSeek V3, R1, V3.1, Kimi K2: latent attention; experts in groups that a sigmoid scores.

A stored bias is added to the scores for the choice alone. The first layers are dense. Kimi K2 has
one group, and the same names. The releases of DeepSeek have one more layer, which drafts tokens if
it is asked to; else it is left out.
"""

import dataclasses

from jaxllm.layers.router import RouterSpec
from jaxllm.models.checkpoint_map import LLAMA_NAMES, CheckpointMap
from jaxllm.models.draft_head import HeadSpec
from jaxllm.models.expert_tensors import each_expert
from jaxllm.models.families.glm4_moe import read_sigmoid_router
from jaxllm.models.family import Family, pre_norm_layer, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.mtp import next_layer
from jaxllm.models.read_latent_attention import FOLLOWING, read_latent_attention, with_latents
from jaxllm.models.read_moe import TRAINING, read_moe
from jaxllm.models.specs import Architecture, MixerSpec

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {
    "num_key_value_heads": 128,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    config.must_be("scoring_func", "sigmoid")
    config.must_be("topk_method", "noaux_tc")
    config.must_be("moe_layer_freq", 1)
    return read_with_experts(
        name, config, read_latent_attention(config), read_sigmoid_router(config)
    )


def read_with_experts(
    name: str,
    config: HFConfig,
    attention: MixerSpec,
    router: RouterSpec,
    *,
    mlp_bias: bool = False,
) -> Architecture:
    """Read a decoder whose first layers are dense, and whose experts have a shared MLP beside
    them."""
    mlp = read_mlp(config, bias=mlp_bias)
    num_shared = config.integer("n_shared_experts", 1)
    size = num_shared * config.integer("moe_intermediate_size")
    shared = dataclasses.replace(mlp, intermediate_size=size)
    moe = read_moe(config, router, count="n_routed_experts", shared=shared)
    num_dense = config.integer("first_k_dense_replace", lowest=0)
    layers = [
        pre_norm_layer(config, attention, mlp if index < num_dense else moe)
        for index in range(config.integer("num_hidden_layers"))
    ]
    return read_decoder(name, config, layers)


def checkpoint(architecture: Architecture) -> CheckpointMap:
    names = with_latents(LLAMA_NAMES, architecture).with_rules(experts=each_expert())
    # Behind the decoder there may be layers that draft.
    drafting = rf"model\.layers\.{architecture.num_layers}\..*"
    return dataclasses.replace(names, ignored=(*names.ignored, drafting))


def draft_head(architecture: Architecture) -> HeadSpec:
    return next_layer(architecture, checkpoint(architecture))


# Of the tiny checkpoints of families with latent attention.
TINY = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}

TINY_GAINS = {"gate": 2.0, "q_b_proj": 1.5}

HARMLESS = (
    TRAINING
    | FOLLOWING
    | dict.fromkeys(
        ("num_nextn_predict_layers", "num_mtp_layers"),
        "counts layers behind the decoder, which draft tokens if they are asked to",
    )
    | {"ep_size": "says how experts were spread over devices in training"}
)

FAMILY = Family(
    read=read,
    checkpoint=checkpoint,
    tiny={
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **TINY,
        "rope_theta": None,
        "rope_parameters": YARN,
    },
    tiny_gains=TINY_GAINS,
    harmless=HARMLESS,
    draft_head=draft_head,
)
