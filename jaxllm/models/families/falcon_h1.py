"""Falcon-H1: attention and Mamba2 side by side in every layer, with multipliers for all parts.

Those of attention are in the scale of its scores and in its values, since it has no biases: what
multiplies its input and its keys, and what multiplies its output.
"""

import dataclasses
from collections.abc import Sequence

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.layers.attention import AttentionSpec
from jaxllm.layers.mamba import GatedNormSpec, MambaScales, MambaSpec
from jaxllm.layers.mlp import MLPSpec
from jaxllm.models.blocks import PreNormBlock
from jaxllm.models.families import bamba
from jaxllm.models.family import Family, read_attention, read_decoder, read_mlp, read_norm
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_recurrent import MAMBA_HARMLESS, read_mamba
from jaxllm.models.specs import Architecture, LayerSpec

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "mamba_d_ssm": 1024,
}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    config.must_be("mamba_use_mlp", True)
    config.must_be("attn_layer_indices")
    layer = LayerSpec(
        mixers=(_read_attention(config), _read_mamba(config)),
        ffns=(_read_mlp(config),),
        norm=read_norm(config),
        block=PreNormBlock,
    )
    return read_decoder(
        name,
        config,
        [layer] * config.integer("num_hidden_layers"),
        embedding_scale=config.positive("embedding_multiplier", 1.0),
        logits_scale=config.positive("lm_head_multiplier", 1.0),
    )


def _read_attention(config: HFConfig) -> AttentionSpec:
    attention = read_attention(config)
    if config.flag("attention_bias"):
        raise UnsupportedModelError(
            "config.json: attention_bias=True is not supported for Falcon-H1"
        )
    of_input, of_keys, of_output = (
        config.positive(field, 1.0)
        for field in ("attention_in_multiplier", "key_multiplier", "attention_out_multiplier")
    )
    return dataclasses.replace(
        attention,
        scale=attention.scale * of_input**2 * of_keys,
        value_scale=of_input * of_output,
    )


def _read_mamba(config: HFConfig) -> MambaSpec:
    norm = None
    before_gate = config.flag("mamba_norm_before_gate", True)
    if config.flag("mamba_rms_norm"):
        eps = config.positive("rms_norm_eps", 1e-5)
        norm = GatedNormSpec(eps=eps, before_gate=before_gate)
    inner = None if config.get("mamba_d_ssm") is None else config.integer("mamba_d_ssm")
    gate, x, b, c, step = _read_scales(config, "ssm_multipliers", 5)
    scales = MambaScales(
        input=config.positive("ssm_in_multiplier", 1.0),
        gate=gate,
        x=x,
        b=b,
        c=c,
        step=step,
        output=config.positive("ssm_out_multiplier", 1.0),
    )
    out_bias = config.flag("projectors_bias")
    mamba = read_mamba(config, norm, inner_size=inner, out_bias=out_bias)
    return dataclasses.replace(mamba, scales=scales)


def _read_mlp(config: HFConfig) -> MLPSpec:
    mlp = read_mlp(config, bias=config.flag("mlp_bias"))
    gate, output = _read_scales(config, "mlp_multipliers", 2)
    return dataclasses.replace(mlp, gate_scale=gate, output_scale=output)


def _read_scales(config: HFConfig, name: str, count: int) -> list[float]:
    """The numbers of a list; all one if the field is missing."""
    value = config.get(name)
    if value is None:
        return [1.0] * count
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else []
    if len(items) != count or not all(type(item) in (int, float) for item in items):
        raise CheckpointError(
            f"config.json: {name}={shown(value)} must be a list of {count} numbers"
        )
    return [float(item) for item in items]


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: bamba.NAMES,
    tiny={
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "head_dim": 24,
        "mamba_d_ssm": 96,
        "mamba_n_heads": 8,
        "mamba_d_head": 12,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.1,
        "ssm_out_multiplier": 0.7,
        "key_multiplier": 0.6,
        "mlp_multipliers": [0.9, 0.5],
        "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.8,
    },
    tiny_gains={"mamba": -1.0},
    harmless=MAMBA_HARMLESS
    | {
        "mamba_expand": "read where mamba_d_ssm does not say the size",
        "mlp_expansion_factor": "intermediate_size says it",
    },
)
