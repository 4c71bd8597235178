"""Granite 3 MoE: Granite with experts in place of each MLP.

A token's factors are the softmax of the logits of its chosen experts. Two tensors hold all experts
of a layer.
"""

from jaxllm.layers.router import RouterSpec
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.expert_tensors import stacked_experts
from jaxllm.models.families.granite import read_granite
from jaxllm.models.family import Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_moe import TRAINING, read_moe
from jaxllm.models.specs import Architecture

_NAMES = LLAMA_NAMES.with_rules(
    experts=stacked_experts("input_linear.weight", "output_linear.weight")
).with_names(mlp="block_sparse_moe", gate="router.layer")


def read(name: str, config: HFConfig) -> Architecture:
    moe = read_moe(
        config,
        RouterSpec(scores="softmax of chosen", rounds_factors=True),
        count="num_local_experts",
        default_count=8,
        default_choices=2,
        size="intermediate_size",
        default_size=11_008,
    )
    return read_granite(name, config, moe)


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: _NAMES,
    tiny={
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "tie_word_embeddings": True,
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "embedding_multiplier": 1.5,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.25,
    },
    tiny_gains={"layer": 2.0, "input_linear": 1.5, "output_linear": 1.5},
    harmless=TRAINING,
)
