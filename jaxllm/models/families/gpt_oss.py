"""gpt-oss: experts with biases and a clamped activation, sinks, and a window in every second layer.

Every head's softmax has the stored logit of one more key, the sink. The rotation is that of yarn in
all layers, with bounds that are not rounded. A token's factors are the softmax of the logits of its
chosen experts. Releases in 16 bits have two tensors for all experts of a layer, [in, out], where
gate and up alternate. In MXFP4 they are codes, [out, in].
"""

import dataclasses

from jaxllm.layers.norm import RMSNormSpec
from jaxllm.layers.router import RouterSpec
from jaxllm.models.blocks import PreNormBlock
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.expert_tensors import stacked_experts
from jaxllm.models.family import (
    FULL,
    SLIDING,
    Family,
    read_attention,
    read_decoder,
    read_window,
    windows_of,
)
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_moe import TRAINING, read_moe
from jaxllm.models.specs import Architecture, LayerSpec

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "intermediate_size": 2880,
    "attention_bias": True,
}
_ROPE_THETA = 150_000.0
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_NAMES = LLAMA_NAMES.with_rules(
    experts=stacked_experts(
        "experts.gate_up_proj", "experts.down_proj", is_transposed=True, alternates=True
    )
).with_names(gate="router")


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        theta = config.positive("rope_theta", _ROPE_THETA)
        config = config.replaced({"rope_parameters": _ROPE | {"rope_theta": theta}})
    config.must_be("experts_per_token", config.integer("num_experts_per_tok"))
    bias = config.flag("attention_bias")
    attention = dataclasses.replace(
        read_attention(config, qkv_bias=bias, o_bias=bias, default_theta=_ROPE_THETA),
        has_sinks=True,
    )
    moe = read_moe(
        config,
        RouterSpec(scores="softmax of chosen", bias=True, rounds_factors=True),
        count="num_local_experts",
        size="intermediate_size",
        bias=True,
    )
    activation = dataclasses.replace(
        moe.activation,
        gate_slope=config.positive("swiglu_alpha", 1.702),
        limit=config.positive("swiglu_limit", 7.0),
        up_offset=1.0,
    )
    moe = dataclasses.replace(moe, activation=activation)
    norm = RMSNormSpec(eps=config.positive("rms_norm_eps", 1e-5), rounds_first=False)
    num_layers = config.integer("num_hidden_layers")
    kinds = config.layer_types(num_layers, supported=(FULL, SLIDING))
    kinds = kinds or [FULL if layer % 2 else SLIDING for layer in range(num_layers)]
    layers = [
        LayerSpec(
            mixers=(dataclasses.replace(attention, window=window),),
            ffns=(moe,),
            norm=norm,
            block=PreNormBlock,
        )
        for window in windows_of(kinds, read_window(config))
    ]
    return read_decoder(name, config, layers)


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: _NAMES,
    tiny={
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": 24,
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 8,
        "swiglu_limit": 1.0,
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    tiny_gains={"router": 2.0, "experts": 1.5},
    harmless=TRAINING
    | {"initial_context_length": "repeats rope_scaling's original_max_position_embeddings"},
)
