"""Phi-1, Phi-1.5 and Phi-2: attention and MLP side by side behind one LayerNorm, biases everywhere.

The MLP has no gate. A part of each head is rotated. The head has a bias, too.
"""

from jaxllm.errors import UnsupportedModelError
from jaxllm.layers.attention import QKNorm
from jaxllm.layers.norm import LayerNormSpec
from jaxllm.models.blocks import ParallelBlock
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import Family, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture, LayerSpec


def read(name: str, config: HFConfig) -> Architecture:
    norm = LayerNormSpec(eps=config.positive("layer_norm_eps", 1e-5))
    attention = read_attention(
        config,
        qkv_bias=True,
        o_bias=True,
        qk_norm=QKNorm(norm=norm) if config.flag("qk_layernorm") else None,
        may_rotate_a_part=True,
        default_share=0.5,
    )
    layer = LayerSpec(
        mixers=(attention,),
        ffns=(read_mlp(config, bias=True, is_gated=False, default_activation="gelu_new"),),
        norm=norm,
        block=ParallelBlock,
    )
    if config.flag("tie_word_embeddings"):
        raise UnsupportedModelError(
            "config.json: tie_word_embeddings=True is not supported for a head with a bias"
        )
    layers = [layer] * config.integer("num_hidden_layers")
    return read_decoder(name, config, layers, has_head_bias=True)


NAMES = LLAMA_NAMES.with_names(
    o_proj="dense",
    up_proj="fc1",
    down_proj="fc2",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    norm="final_layernorm",
)

FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: NAMES,
    tiny={
        "architectures": ["PhiForCausalLM"],
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "rms_norm_eps": None,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    },
)
