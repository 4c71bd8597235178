"""LFM2 with experts: LFM2 with experts that a sigmoid scores in all layers but the first two.

A stored bias is added to the scores for the choice alone.
"""

from jaxllm.layers.router import RouterSpec
from jaxllm.models.expert_tensors import each_expert, router_with_bias_at
from jaxllm.models.families import lfm2
from jaxllm.models.families.lfm2 import read_lfm2
from jaxllm.models.family import Family, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_moe import TRAINING, read_moe
from jaxllm.models.specs import Architecture

# Of the class in transformers, where they are not LFM2's.
_DEFAULTS = {
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
_NAMES = lfm2.NAMES.with_rules(
    experts=each_expert("w1", "w3", "w2"), gate=router_with_bias_at("expert_bias")
)


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(lfm2.DEFAULTS | _DEFAULTS)
    router = RouterSpec(
        scores="sigmoid",
        normalises=config.flag("norm_topk_prob", True),
        added_to_sum=1e-6,
        scale=config.positive("routed_scaling_factor", 1.0),
        has_selection_bias=config.flag("use_expert_bias", True),
        rounds_factors=True,
    )
    mlp, moe = read_mlp(config), read_moe(config, router)
    num_layers = config.integer("num_hidden_layers")
    num_dense = config.integer("num_dense_layers", 2, lowest=0)
    ffns = [mlp if index < num_dense else moe for index in range(num_layers)]
    return read_lfm2(name, config, ffns)


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: _NAMES,
    tiny=dict(lfm2.FAMILY.tiny)
    | {
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "block_multiple_of": None,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
        "conv_bias": True,
    },
    tiny_gains=dict(lfm2.FAMILY.tiny_gains) | {"gate": 2.0},
    harmless=TRAINING,
)
