"""MiniMax M2 and M2.1: experts that a sigmoid scores in all layers, and no shared MLP.

A stored bias is added to the scores for the choice alone. The norm of queries and the norm of keys
are over all heads together, and `rotary_dim` elements of each head are rotated.
"""

from jaxllm.layers.attention import QKNorm
from jaxllm.layers.router import RouterSpec
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.expert_tensors import each_expert, router_with_bias_at
from jaxllm.models.family import (
    Family,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_norm,
)
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_moe import TRAINING, read_moe
from jaxllm.models.specs import Architecture

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 1536,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}
_NAMES = LLAMA_NAMES.with_rules(
    experts=each_expert("w1", "w3", "w2"), gate=router_with_bias_at("e_score_correction_bias")
).with_names(mlp="block_sparse_moe")


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    num_layers = config.integer("num_hidden_layers")
    _refuse_other_designs(config, num_layers)
    if config.get("rotary_dim") is not None:
        share = config.integer("rotary_dim") / config.integer("head_dim")
        config = config.replaced({"partial_rotary_factor": share})
    attention = read_attention(
        config,
        qk_norm=QKNorm(norm=read_norm(config), over_all_heads=True),
        default_theta=5_000_000.0,
        may_rotate_a_part=True,
    )
    router = RouterSpec(scores="sigmoid", normalises=True, has_selection_bias=True)
    moe = read_moe(config, router, count="num_local_experts", size="intermediate_size")
    return read_decoder(name, config, [pre_norm_layer(config, attention, moe)] * num_layers)


def _refuse_other_designs(config: HFConfig, num_layers: int) -> None:
    """Released configs have fields of other models of the same makers."""
    config.must_be("attn_type_list", [1] * num_layers)
    config.must_be("scoring_func", "sigmoid")
    config.must_be("qk_norm_type", "per_layer")
    for asked in ("use_qk_norm", "use_routing_bias"):
        config.must_be(asked, True)
    config.must_be("shared_intermediate_size", 0)
    config.must_be("sliding_window")
    for beta in ("layernorm_full_attention_beta", "layernorm_mlp_beta"):
        config.must_be(beta, 1.0)


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: _NAMES,
    tiny={
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "head_dim": 24,
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "rotary_dim": 12,
    },
    tiny_gains={"gate": 2.0, "w1": 1.5, "w2": 1.5, "w3": 1.5},
    harmless=TRAINING
    | dict.fromkeys(
        ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
        "describes modules behind the decoder, which draft tokens and are not in releases",
    )
    | {
        "layernorm_linear_attention_beta": "of linear attention, which no layer has",
        "shared_moe_mode": "of a shared MLP, which no layer has",
        "mlp_intermediate_size": "of a dense MLP, which no layer has",
    },
)
