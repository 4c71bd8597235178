"""DeepSeek V2, V2-Lite, V2.5: latent attention; experts that a softmax scores, with a shared MLP.

V2 chooses experts among those of the groups with the best expert, V2-Lite among all. The factors of
a token are not divided by their sum. The first layers are dense.
"""

from jaxllm.layers.router import RouterSpec
from jaxllm.models.families.deepseek_v3 import (
    HARMLESS,
    TINY,
    TINY_GAINS,
    YARN,
    checkpoint,
    read_with_experts,
)
from jaxllm.models.family import Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_latent_attention import read_latent_attention
from jaxllm.models.specs import Architecture

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {
    "intermediate_size": 11_008,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 2048,
}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    config.must_be("scoring_func", "softmax")
    config.must_be("topk_method", "greedy", "group_limited_greedy")
    config.must_be("norm_topk_prob", False)
    config.must_be("moe_layer_freq", 1)
    config.must_be("rope_interleave", True)
    # Numbers of groups are in files of V2-Lite, too, and count only with this method.
    has_groups = config.get("topk_method") == "group_limited_greedy"
    num_groups, chosen = config.integer("n_group", 1), config.integer("topk_group", 1)
    router = RouterSpec(
        scores="softmax",
        scale=config.positive("routed_scaling_factor", 1.0),
        num_groups=num_groups if has_groups else 1,
        chosen_groups=chosen if has_groups else 1,
        best_of_group=1,
        in_float32=True,
    )
    attention = read_latent_attention(config)
    return read_with_experts(name, config, attention, router, mlp_bias=config.flag("mlp_bias"))


FAMILY = Family(
    read=read,
    checkpoint=checkpoint,
    tiny={
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        **TINY,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
        "rope_theta": None,
        "rope_parameters": YARN,
    },
    tiny_gains=TINY_GAINS,
    harmless=HARMLESS,
)
