"""StarCoder2: LayerNorms, an MLP of two matrices, biases everywhere, and a window in every layer.

The released models have the window of 4096 tokens; the smaller two tie their embeddings.
"""

import dataclasses

from jaxllm.layers.norm import LayerNormSpec
from jaxllm.models.blocks import PreNormBlock
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import Family, read_attention, read_decoder, read_mlp, read_window
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture, LayerSpec

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {"num_key_value_heads": 2, "tie_word_embeddings": True}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    config.must_be("mlp_type", "default")
    config.must_be("norm_type", "layer_norm")
    config.must_be("scale_attn_weights", True)
    bias = config.flag("use_bias", True)
    layer = LayerSpec(
        mixers=(
            dataclasses.replace(
                read_attention(config, qkv_bias=bias, o_bias=bias), window=read_window(config)
            ),
        ),
        ffns=(read_mlp(config, bias=bias, is_gated=False, default_activation="gelu_pytorch_tanh"),),
        norm=LayerNormSpec(eps=config.positive("norm_epsilon", 1e-5)),
        block=PreNormBlock,
    )
    return read_decoder(name, config, [layer] * config.integer("num_hidden_layers"))


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES.with_names(up_proj="c_fc", down_proj="c_proj"),
    tiny={
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": None,
        "norm_epsilon": 1e-5,
        "sliding_window": 9,
        "tie_word_embeddings": True,
    },
    harmless={
        "layer_norm_epsilon": "an older name of norm_epsilon, which is read",
        "activation_function": "an older name of hidden_act, which is read",
        "attention_softmax_in_fp32": "the softmax is in float32",
        "scale_attention_softmax_in_fp32": "the softmax is in float32",
    },
)
