"""Qwen3: Qwen2 with a norm on every query and key head, and its own head_dim."""

from jaxllm.layers.attention import QKNorm
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.families.qwen2 import DEFAULTS, read_qwen
from jaxllm.models.family import Family, read_attention, read_norm
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(DEFAULTS)
    bias = config.flag("attention_bias")
    attention = read_attention(
        config,
        default_head_size=128,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=QKNorm(norm=read_norm(config)),
    )
    return read_qwen(name, config, attention)


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: LLAMA_NAMES,
    tiny={
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "head_dim": 32,
    },
)
