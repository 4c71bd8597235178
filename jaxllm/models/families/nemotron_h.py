"""Nemotron-H and Nemotron 3: each layer is Mamba2, attention, an MLP or experts behind one norm.

MLPs and experts are of squared ReLU, without gates. Attention does not rotate. The router is that
of DeepSeek V3. Experts of Nemotron 3 Super compute with shorter vectors between two projections.
Releases have two more layers, attention and experts, which draft tokens if they are asked to; else
they are left out.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.layers.attention import AttentionSpec
from jaxllm.layers.mamba import GatedNormSpec, MambaSpec
from jaxllm.layers.mlp import MLPSpec
from jaxllm.layers.moe import MoESpec
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.models.blocks import PreNormBlock, SingleBlock
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.draft_head import HeadSpec
from jaxllm.models.expert_tensors import each_expert
from jaxllm.models.families import mamba2
from jaxllm.models.families.glm4_moe import read_sigmoid_router
from jaxllm.models.family import FULL, Family, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.mtp import head_at, layer_with
from jaxllm.models.read_moe import TRAINING, read_moe
from jaxllm.models.read_recurrent import ATTENTION, LINEAR, MAMBA, MAMBA_HARMLESS, read_mamba
from jaxllm.models.specs import Architecture, LayerSpec

_Kind = Literal["M", "E", "*", "-"]
# Of `hybrid_override_pattern`, and in lists of types: Mamba2, experts, attention, an MLP.
_KINDS: dict[str, _Kind] = {
    **{MAMBA: "M", LINEAR: "M", "moe": "E", ATTENTION: "*", FULL: "*", "mlp": "-"},
    **{"M": "M", "E": "E", "*": "*", "-": "-"},
}
# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 21_504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
}
_NAMES = mamba2.NAMES.with_rules(experts=each_expert(None)).with_names(
    self_attn="mixer", mlp="mixer"
)


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    config.must_be("residual_in_fp32", False)
    config.must_be("sliding_window")
    eps = config.positive("layer_norm_epsilon", 1e-5)
    config.must_be("norm_eps", eps)
    norm = RMSNormSpec(eps=eps, rounds_first=False)
    # All are read, whether or not there are such layers: their fields are in every config.
    of_kinds = {
        kind: LayerSpec(mixers=mixers, ffns=ffns, norm=norm, block=SingleBlock)
        for kind, mixers, ffns in (
            ("M", (_read_mamba(config),), ()),
            ("*", (_read_attention(config),), ()),
            ("-", (), (_read_mlp(config),)),
            ("E", (), (_read_experts(config),)),
        )
    }
    return read_decoder(name, config, [of_kinds[kind] for kind in _read_kinds(config)])


def _read_kinds(config: HFConfig) -> list[_Kind]:
    """What each layer is."""
    config = config.where(layer_types="layers_block_type")
    listed, pattern = config.names("layer_types"), config.get("hybrid_override_pattern")
    if listed is None and pattern is not None and not isinstance(pattern, str):
        raise CheckpointError(
            f"config.json: hybrid_override_pattern={shown(pattern)} must be a string"
        )
    kinds = list(pattern or "ME*-") if listed is None else listed
    if unknown := sorted(set(kinds) - _KINDS.keys()):
        raise UnsupportedModelError(
            f"layer type {', '.join(unknown):.80} is not supported; supported are Mamba2 (M), "
            "attention (*), mlp (-) and moe (E)"
        )
    config.must_be("num_hidden_layers", len(kinds))
    return [_KINDS[kind] for kind in kinds]


def _read_mamba(config: HFConfig) -> MambaSpec:
    eps = config.positive("layer_norm_epsilon", 1e-5)
    config.must_be("mamba_proj_bias", False)
    config = config.where(
        mamba_n_heads="mamba_num_heads",
        mamba_d_head="mamba_head_dim",
        mamba_n_groups="n_groups",
        mamba_d_state="ssm_state_size",
        mamba_d_conv="conv_kernel",
        mamba_conv_bias="use_conv_bias",
    )
    bias = config.flag("use_bias")
    inner = config.integer("mamba_n_heads") * config.integer("mamba_d_head")
    return read_mamba(
        config,
        GatedNormSpec(eps=eps),
        inner_size=inner,
        activation="mamba_hidden_act",
        in_bias=bias,
        out_bias=bias,
    )


def _read_attention(config: HFConfig) -> AttentionSpec:
    config.must_be("attention_bias", False)
    attention = read_attention(config, rotates=False)
    config.must_be("attention_head_dim", attention.head_size)
    return attention


def _read_mlp(config: HFConfig) -> MLPSpec:
    return read_mlp(
        config,
        bias=config.flag("mlp_bias"),
        is_gated=False,
        activation="mlp_hidden_act",
        default_activation="relu2",
    )


def _read_experts(config: HFConfig) -> MoESpec:
    config.must_be("n_shared_experts", 1)
    size = config.integer("moe_shared_expert_intermediate_size", 7688)
    shared = _read_mlp(config.replaced({"intermediate_size": size}))
    latent = config.get("moe_latent_size")
    return read_moe(
        config,
        read_sigmoid_router(config),
        count="n_routed_experts",
        default_count=8,
        default_choices=2,
        default_size=7688,
        activation="mlp_hidden_act",
        is_gated=False,
        shared=shared,
        latent_size=None if latent is None else config.integer("moe_latent_size"),
        latent_bias=shared.bias,
    )


def _draft_head(architecture: Architecture) -> HeadSpec:
    """Both layers are one of ours: a norm before the attention, and another before the experts."""
    fields = architecture.hf_config
    if (number := fields.get("num_nextn_predict_layers")) != 1:
        raise UnsupportedModelError(
            f"config.json: num_nextn_predict_layers={shown(number)}: layers that draft are known "
            "of models with 1"
        )
    for name in ("mtp_layers_block_type", "mtp_hybrid_override_pattern"):
        kinds = fields.get(name) or "*E"
        listed = kinds if isinstance(kinds, str | Sequence) else ()
        if [_KINDS.get(kind) for kind in listed] != ["*", "E"]:
            raise UnsupportedModelError(
                f"config.json: {name}={shown(kinds)} is not supported; layers that draft are "
                "attention and experts"
            )
    attention, experts = (layer_with(architecture, kind) for kind in (AttentionSpec, MoESpec))
    return head_at(
        "mtp",
        architecture,
        LLAMA_NAMES.with_rules(experts=each_expert(None)),
        dataclasses.replace(attention, ffns=experts.ffns, block=PreNormBlock),
        renamed={
            **{name: f"mtp.layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj")},
            "layer": "",
            "input_layernorm": "mtp.layers.0.norm",
            "self_attn": "mtp.layers.0.mixer",
            "post_attention_layernorm": "mtp.layers.1.norm",
            "mlp": "mtp.layers.1.mixer",
            "norm": "mtp.layers.1.final_layernorm",
        },
        passes_normed=True,
    )


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: _NAMES.ignoring(r"mtp\..*"),
    tiny={
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        **dict.fromkeys(("num_hidden_layers", "hidden_act", "rms_norm_eps", "rope_theta")),
        "layer_norm_epsilon": 1e-5,
        "hybrid_override_pattern": "MEM*-",
        "intermediate_size": 96,
        "head_dim": 24,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 24,
        # Prefills of transformers would clamp the steps of tokens, and its decodes would not.
        "time_step_min": 1e-9,
        "mlp_hidden_act": "relu2",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 2.5,
    },
    tiny_gains={"gate": 2.0, "mixer": -1.0},
    harmless=TRAINING
    | MAMBA_HARMLESS
    | dict.fromkeys(
        (
            "num_nextn_predict_layers",
            "mtp_layers_block_type",
            "mtp_hybrid_override_pattern",
        ),
        "of layers behind the decoder, which draft tokens if they are asked to",
    )
    | dict.fromkeys(
        ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
        "attention does not rotate",
    )
    | {
        "expand": "mamba_num_heads and mamba_head_dim say the size",
        "hidden_act": "mlp_hidden_act and mamba_hidden_act say the functions",
        "moe_shared_expert_overlap": "how others compute, not what",
        "mamba_ssm_cache_dtype": "states are float32",
    },
    draft_head=_draft_head,
)
