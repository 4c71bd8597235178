"""Bamba: Mamba2 in most layers, attention that rotates half of each head in a few, MLPs in all."""

from jaxllm.layers.mamba import GatedNormSpec
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import Family, pre_norm_layer, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_recurrent import (
    MAMBA_HARMLESS,
    final_norm_at,
    read_layer_numbers,
    read_mamba,
    taps,
)
from jaxllm.models.specs import Architecture

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262_144,
}
NAMES = LLAMA_NAMES.with_rules(conv1d=taps, norm=final_norm_at("final_layernorm")).with_names(
    mlp="feed_forward", post_attention_layernorm="pre_ff_layernorm"
)


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    bias = config.flag("attention_bias")
    attention = read_attention(
        config, qkv_bias=bias, o_bias=bias, may_rotate_a_part=True, default_share=0.5
    )
    assert attention.rope is not None
    config.must_be("attn_rotary_emb", attention.rope.size)
    mamba = read_mamba(config, GatedNormSpec(eps=config.positive("rms_norm_eps", 1e-5)))
    mlp = read_mlp(config, bias=config.flag("mlp_bias"))
    with_attention = read_layer_numbers(config, "attn_layer_indices") or []
    layers = [
        pre_norm_layer(config, attention if index in with_attention else mamba, mlp)
        for index in range(config.integer("num_hidden_layers"))
    ]
    return read_decoder(name, config, layers)


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: NAMES,
    tiny={
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": "auto",
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
        "mamba_proj_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    tiny_gains={"mamba": -1.0},
    harmless=MAMBA_HARMLESS
    | {"z_loss_coefficient": "acts in training only: a loss of large logits"},
)
