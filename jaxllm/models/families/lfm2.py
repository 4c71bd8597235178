"""LFM2: short convolutions in most layers, and attention with norms of queries and keys in others.

The tied embedding is not scaled. By default the MLPs are of another width than `intermediate_size`
says: two thirds of it, rounded up.
"""

import dataclasses
from collections.abc import Iterable

from jaxllm.layers.attention import QKNorm
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.layers.short_conv import ShortConvSpec
from jaxllm.models.blocks import PreNormBlock
from jaxllm.models.checkpoint_map import LLAMA_NAMES, concatenated
from jaxllm.models.family import Family, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_recurrent import read_conv_width, read_kinds, read_layer_numbers, taps
from jaxllm.models.specs import Architecture, FFNSpec, LayerSpec

# Of the class in transformers, where they are not those that most families share.
DEFAULTS = {
    "vocab_size": 65_536,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
}
NAMES = LLAMA_NAMES.with_rules(gate_up_proj=concatenated("w1", "w3"), conv=taps).with_names(
    short_conv="conv",
    o_proj="out_proj",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    mlp="feed_forward",
    down_proj="w2",
    input_layernorm="operator_norm",
    post_attention_layernorm="ffn_norm",
    norm="embedding_norm",
)


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(DEFAULTS)
    if config.get("block_ff_dim") is not None:  # takes precedence
        config = config.replaced({"intermediate_size": config.integer("block_ff_dim")})
    _refuse_other_designs(config)
    mlp = read_mlp(config)
    mlp = dataclasses.replace(mlp, intermediate_size=_read_width(config, mlp.intermediate_size))
    return read_lfm2(name, config, [mlp] * config.integer("num_hidden_layers"))


def read_lfm2(name: str, config: HFConfig, ffns: Iterable[FFNSpec]) -> Architecture:
    """Read a decoder of short convolutions and attention, with these ffns."""
    norm = RMSNormSpec(eps=config.positive("norm_eps", 1e-5))
    attention = read_attention(config, qk_norm=QKNorm(norm=norm), default_theta=1_000_000.0)
    conv = ShortConvSpec(
        num_channels=config.integer("hidden_size"),
        width=read_conv_width(config, "conv_L_cache", 3),
        bias=config.flag("conv_bias"),
    )
    layers = [
        LayerSpec(
            mixers=(conv if is_conv else attention,), ffns=(ffn,), norm=norm, block=PreNormBlock
        )
        for is_conv, ffn in zip(_read_kinds(config), ffns, strict=True)
    ]
    if config.get("tie_embedding") is not None:  # takes precedence
        config = config.replaced({"tie_word_embeddings": config.flag("tie_embedding")})
    return read_decoder(name, config, layers, is_tied_by_default=True)


def _read_kinds(config: HFConfig) -> list[bool]:
    """Whether each layer has a convolution."""
    kinds = read_kinds(config, ("conv",))
    with_attention = read_layer_numbers(config, "full_attn_idxs")
    if kinds is not None:
        return kinds
    indices = range(config.integer("num_hidden_layers"))
    return [with_attention is not None and index not in with_attention for index in indices]


def _read_width(config: HFConfig, size: int) -> int:
    """The width of an MLP, as the class in transformers computes it."""
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    factor = None if factor is None else config.positive("block_ffn_dim_multiplier", 1.0)
    multiple = config.integer("block_multiple_of", 256)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    return size if factor is None else -(-int(factor * size) // multiple) * multiple


def _refuse_other_designs(config: HFConfig) -> None:
    """Releases have fields of the software in which they were trained; no class reads these."""
    size = config.integer("hidden_size")
    for width in ("block_dim", "conv_dim", "conv_dim_out"):
        config.must_be(width, size)
    config.must_be("num_heads", config.integer("num_attention_heads"))
    config.must_be("block_norm_eps", config.positive("norm_eps", 1e-5))
    for asked in ("block_use_swiglu", "use_pos_enc"):
        config.must_be(asked, True)


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: NAMES,
    tiny={
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_act": None,
        "rms_norm_eps": None,
        "norm_eps": 1e-5,
        "num_hidden_layers": 4,
        "intermediate_size": 150,
        "block_multiple_of": 32,
        "conv_L_cache": 3,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "tie_word_embeddings": True,
    },
    tiny_gains={
        "out_proj": 2.0,
        "q_layernorm": 1.5,
        "k_layernorm": 1.5,
        "in_proj": 1.5,
        "w1": 1.5,
        "w2": 1.5,
        "w3": 1.5,
    },
    harmless=dict.fromkeys(
        (
            "block_mlp_init_scale",
            "block_out_init_scale",
            "block_use_xavier_init",
            "conv_use_xavier_init",
        ),
        "acts in training only: how weights begin",
    ),
)
