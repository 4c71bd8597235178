"""StableLM: Llama with LayerNorms, and a part of each head rotated.

Some sizes have biases on q, k and v, norms of queries and keys with a weight for each head, or
attention and MLP side by side behind one norm.
"""

import dataclasses

from jaxllm.layers.attention import QKNorm
from jaxllm.layers.norm import LayerNormSpec
from jaxllm.models.blocks import ParallelBlock, PreNormBlock
from jaxllm.models.checkpoint_map import LLAMA_NAMES, Place, Rule, Source, Stack
from jaxllm.models.family import Family, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture, LayerSpec


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults({"num_key_value_heads": 32})
    config.must_be("rotary_scaling_factor", 1.0)
    norm = LayerNormSpec(eps=config.positive("layer_norm_eps", 1e-5))
    of_heads = QKNorm(norm=dataclasses.replace(norm, has_bias=False), has_weight_per_head=True)
    attention = read_attention(
        config,
        qkv_bias=config.flag("use_qkv_bias"),
        qk_norm=of_heads if config.flag("qk_layernorm") else None,
        may_rotate_a_part=True,
        default_share=0.25,
    )
    layer = LayerSpec(
        mixers=(attention,),
        ffns=(read_mlp(config),),
        norm=norm,
        block=ParallelBlock if config.flag("use_parallel_residual") else PreNormBlock,
    )
    return read_decoder(name, config, [layer] * config.integer("num_hidden_layers"))


def one_norm_per_head(module: str) -> Rule:
    def rule(place: Place) -> Source:
        ((heads, size),) = place.pieces
        norms = (place.tensor(f"{module}.norms.{head}", (size,)) for head in range(heads))
        return Stack(tuple(norms))

    return rule


NAMES = LLAMA_NAMES.with_rules(
    q_norm=one_norm_per_head("q_layernorm"), k_norm=one_norm_per_head("k_layernorm")
)

FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: NAMES,
    tiny={
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        "rms_norm_eps": None,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
    },
    harmless=dict.fromkeys(
        ("num_heads", "norm_eps", "rope_pct"),
        "the name of a field in the first release, kept beside the present one",
    ),
)
