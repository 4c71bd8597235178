"""Mixtral: Mistral with eight experts in place of each MLP, of which a token uses two.

A token's factors are the softmax of its router's logits over all experts, divided by their sum over
the chosen ones.
"""

import dataclasses

from jaxllm.layers.router import RouterSpec
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.expert_tensors import each_expert
from jaxllm.models.families.mistral import refuse_mixed_layers
from jaxllm.models.family import (
    Family,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_window,
)
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_moe import TRAINING, read_moe
from jaxllm.models.specs import Architecture

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "intermediate_size": 14_336}
_NAMES = LLAMA_NAMES.with_rules(experts=each_expert("w1", "w3", "w2")).with_names(
    mlp="block_sparse_moe"
)


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    window = read_window(config)
    refuse_mixed_layers(config, window)
    attention = dataclasses.replace(
        read_attention(config, default_theta=1_000_000.0), window=window
    )
    moe = read_moe(
        config,
        RouterSpec(scores="softmax", normalises=True),
        count="num_local_experts",
        default_count=8,
        default_choices=2,
        size="intermediate_size",
    )
    layer = pre_norm_layer(config, attention, moe)
    return read_decoder(name, config, [layer] * config.integer("num_hidden_layers"))


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: _NAMES,
    tiny={
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    tiny_gains={"gate": 2.0, "w1": 1.5, "w2": 1.5, "w3": 1.5},
    harmless=TRAINING,
)
