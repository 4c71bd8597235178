"""OLMoE: Llama with experts in place of each MLP, and with a norm of queries and keys.

The norm of queries and the norm of keys are over all heads together. The factors of a token are not
divided by their sum, unless the config says so.
"""

from jaxllm.errors import UnsupportedModelError, shown
from jaxllm.layers.attention import QKNorm
from jaxllm.layers.router import RouterSpec
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.expert_tensors import each_expert
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
    "rms_norm_eps": 1e-5,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "intermediate_size": 2048,
}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    if (clip := config.get("clip_qkv")) is not None:
        raise UnsupportedModelError(
            f"config.json: clip_qkv={shown(clip)} is not supported for OLMoE; null is"
        )
    bias = config.flag("attention_bias")
    attention = read_attention(
        config,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=QKNorm(norm=read_norm(config), over_all_heads=True),
    )
    router = RouterSpec(
        scores="softmax", normalises=config.flag("norm_topk_prob"), rounds_factors=True
    )
    layer = pre_norm_layer(config, attention, read_moe(config, router, size="intermediate_size"))
    return read_decoder(name, config, [layer] * config.integer("num_hidden_layers"))


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES.with_rules(experts=each_expert()),
    tiny={
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    },
    tiny_gains={"gate": 2.0},
    harmless=TRAINING,
)
