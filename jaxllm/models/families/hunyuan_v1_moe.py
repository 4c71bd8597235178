"""Hunyuan-A13B: Hunyuan V1 with experts beside the MLP of every layer.

The scores are a softmax of float32 logits, and the factors of a token are divided by their sum. The
shared MLP is as large as an expert.
"""

from jaxllm.layers.router import RouterSpec
from jaxllm.models.expert_tensors import each_expert
from jaxllm.models.families.hunyuan_v1_dense import (
    HARMLESS,
    NAMES,
    read_hunyuan_attention,
)
from jaxllm.models.family import Family, pre_norm_layer, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_moe import TRAINING, read_moe, read_same_number
from jaxllm.models.specs import Architecture

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {"rms_norm_eps": 1e-5, "intermediate_size": 11_008}
_NAMES = NAMES.with_rules(experts=each_expert()).with_names(
    gate="gate.wg", shared_experts="shared_mlp"
)


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    num_layers = config.integer("num_hidden_layers")
    # Releases list the same number for every layer.
    same = {
        field: read_same_number(config, field, num_layers, default)
        for field, default in (
            ("num_experts", 1),
            ("moe_topk", 1),
            ("num_shared_expert", 1),
            ("moe_intermediate_size", config.integer("intermediate_size")),
        )
    }
    config = config.replaced(same)
    config.must_be("num_shared_expert", 1)
    config.must_be("moe_intermediate_size", config.integer("intermediate_size"))
    for asked in ("use_mixed_mlp_moe", "norm_topk_prob"):
        config.must_be(asked, True)
    for other in (
        "moe_drop_tokens",
        "moe_random_routing_dropped_token",
        "group_limited_greedy",
        "use_mla",
    ):
        config.must_be(other, False)
    config.must_be("moe_layer_num_skipped", 0)
    config.must_be("routed_scaling_factor", 1.0)
    moe = read_moe(
        config,
        RouterSpec(scores="softmax", normalises=True, in_float32=True),
        choices="moe_topk",
        size="intermediate_size",
        shared=read_mlp(config),
    )
    layer = pre_norm_layer(config, read_hunyuan_attention(config), moe)
    return read_decoder(name, config, [layer] * num_layers)


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: _NAMES,
    tiny={
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "model_type": "hunyuan_v1_moe",
        "head_dim": 24,
        "intermediate_size": 48,
        "num_experts": 8,
        "moe_topk": 3,
    },
    tiny_gains={"wg": 2.0, "down_proj": 1.0},
    harmless=HARMLESS | TRAINING,
)
