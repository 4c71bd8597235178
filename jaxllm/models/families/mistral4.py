"""Mistral Small 4: the latent attention of DeepSeek V3, with queries that grow with their position.

A softmax scores its experts. The releases also see images; the decoder is read without its tower.
"""

import dataclasses
from typing import Any

from jaxllm.layers.router import RouterSpec
from jaxllm.models.checkpoint_map import LLAMA_NAMES, CheckpointMap
from jaxllm.models.expert_tensors import stacked_experts, stacked_or_each
from jaxllm.models.families.deepseek_v3 import HARMLESS, TINY, TINY_GAINS, YARN, read_with_experts
from jaxllm.models.family import Family, read_temperature
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_latent_attention import read_latent_attention, with_latents
from jaxllm.models.specs import Architecture

# Of the class in transformers. The config of a decoder inside a larger model leaves them out.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 0,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 1_048_576,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    attention = read_latent_attention(
        config,
        rope_is_part_of_head=True,
        other_parameters=("llama_4_scaling_beta", "max_position_embeddings"),
    )
    attention = dataclasses.replace(attention, temperature=read_temperature(config))
    router = RouterSpec(
        scores="softmax",
        normalises=config.flag("norm_topk_prob", True),
        scale=config.positive("routed_scaling_factor", 1.0),
        num_groups=config.integer("n_group", 1),
        chosen_groups=config.integer("topk_group", 1),
    )
    return read_with_experts(name, config, attention, router)


def checkpoint(architecture: Architecture) -> CheckpointMap:
    experts = stacked_experts("experts.gate_up_proj", "experts.down_proj")
    return stacked_or_each(with_latents(LLAMA_NAMES, architecture), architecture, experts)


FAMILY = Family(
    read=read,
    checkpoint=checkpoint,
    tiny={
        "architectures": ["Mistral4ForCausalLM"],
        "model_type": "mistral4",
        **TINY,
        "rope_theta": None,
        "rope_parameters": YARN | {"llama_4_scaling_beta": 0.3},
    },
    tiny_gains=TINY_GAINS,
    harmless=HARMLESS,
)
