"""Nemotron and Minitron: an MLP of squared ReLU without a gate, and a part of each head rotated.

The norms are LayerNorms. Their weights are stored around zero, and one is added to them.
"""

from jaxllm.layers.norm import LayerNormSpec
from jaxllm.models.blocks import PreNormBlock
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import Family, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture, LayerSpec


def read(name: str, config: HFConfig) -> Architecture:
    bias = config.flag("attention_bias")
    attention = read_attention(
        config, qkv_bias=bias, o_bias=bias, may_rotate_a_part=True, default_share=0.5
    )
    mlp = read_mlp(config, bias=config.flag("mlp_bias"), is_gated=False, default_activation="relu2")
    norm = LayerNormSpec(eps=config.positive("norm_eps", 1e-5), offset=1.0)
    layer = LayerSpec(mixers=(attention,), ffns=(mlp,), norm=norm, block=PreNormBlock)
    return read_decoder(name, config, [layer] * config.integer("num_hidden_layers"))


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES,
    tiny={
        "architectures": ["NemotronForCausalLM"],
        "model_type": "nemotron",
        "hidden_act": "relu2",
        "rms_norm_eps": None,
        "norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "head_dim": 24,
    },
)
