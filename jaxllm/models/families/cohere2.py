"""Command R7B and Command A: Command R with a sliding window in three of four layers.

Layers of full attention have no position embedding: only those with a window rotate.
"""

import dataclasses

from jaxllm.models.families.cohere import checkpoint, read_cohere
from jaxllm.models.families.gemma2 import read_layer_types
from jaxllm.models.family import Family, read_attention, read_window, windows_of
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults({"sliding_window": 4096})
    period = config.integer("sliding_window_pattern", 4)
    _refuse_other_designs(config, period)
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, o_bias=bias)
    attentions = [
        dataclasses.replace(attention, window=window, rope=window and attention.rope)
        for window in windows_of(read_layer_types(config, pattern=period), read_window(config))
    ]
    return read_cohere(name, config, attentions)


def _refuse_other_designs(config: HFConfig, period: int) -> None:
    """Released configs describe the family in fields that have one value each."""
    config.must_be("layer_switch", period)
    config.must_be("order_of_interleaved_layers", "local_attn_first")
    config.must_be("position_embedding_type", "rope_gptj")
    config.must_be("rotary_pct", 1.0)
    config.must_be("use_gated_activation", True)
    config.must_be("use_parallel_block", True)
    config.must_be("use_qk_norm", False)


FAMILY = Family(
    read=read,
    checkpoint=checkpoint,
    tiny={
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "num_hidden_layers": 4,
        "rms_norm_eps": None,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.8,
        "sliding_window": 8,
        "tie_word_embeddings": True,
    },
    harmless={
        "use_embedding_sharing": "tie_word_embeddings says the same",
        "use_parallel_embedding": "how the embedding was cut over devices in training",
    },
)
