"""Kimi-Linear: Kimi delta attention in three layers of four, latent attention in the others.

Latent attention rotates nothing, and its queries are made of the hidden state. The first layer is
dense; the others have the experts of DeepSeek V3, with a shared MLP beside them. Releases and
transformers give some fields other names, and the dense layers' tensors, too.
"""

import dataclasses
from typing import Any

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.layers.kimi_delta import KimiDeltaSpec
from jaxllm.layers.mlp import MLPSpec
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.models.checkpoint_map import (
    LLAMA_NAMES,
    CheckpointMap,
    Place,
    Rule,
    Source,
    ViewedAs,
    as_named,
    concatenated,
)
from jaxllm.models.expert_tensors import each_expert
from jaxllm.models.families.glm4_moe import read_sigmoid_router
from jaxllm.models.family import Family, pre_norm_layer, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig, check_size
from jaxllm.models.read_latent_attention import FOLLOWING, read_latent_attention, with_latents
from jaxllm.models.read_moe import TRAINING, read_moe, read_numbers
from jaxllm.models.read_recurrent import (
    LINEAR,
    MOST_STATE,
    check_activation,
    read_conv_width,
    read_kinds,
    taps_apart,
)
from jaxllm.models.specs import Architecture

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 163_840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "routed_scaling_factor": 2.446,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "model_max_length": 1_048_576,
    "rms_norm_eps": 1e-5,
}
# Usual names of fields, and those of releases.
_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
_KINDS_OF_FFNS = ("dense", "sparse")


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS).where(**_NAMES)
    for field, supported in (
        ("mla_use_nope", True),
        ("moe_layer_freq", 1),
        ("moe_router_activation_func", "sigmoid"),
        ("use_grouped_topk", True),
        ("attention_bias", False),
    ):
        config.must_be(field, supported)
    attention, delta = read_latent_attention(config, rotates=False), _read_delta(config)
    mlp = read_mlp(config)
    size = config.integer("n_shared_experts", 1) * config.integer("moe_intermediate_size")
    moe = read_moe(
        config,
        read_sigmoid_router(config),
        count="num_local_experts",
        shared=dataclasses.replace(mlp, intermediate_size=size),
    )
    layers = [
        pre_norm_layer(config, delta if is_recurrent else attention, mlp if is_dense else moe)
        for is_recurrent, is_dense in zip(_read_mixers(config), _read_dense(config), strict=True)
    ]
    return read_decoder(name, config, layers)


def _linear(config: HFConfig) -> HFConfig:
    """The part of the config that describes linear attention, which a file may lack."""
    if config.get("linear_attn_config") is None:
        return HFConfig({})
    return config.inside("linear_attn_config")


def _read_delta(config: HFConfig) -> KimiDeltaSpec:
    check_activation(config, "hidden_act")
    linear = _linear(config)
    spec = KimiDeltaSpec(
        num_heads=linear.integer("num_heads", config.integer("linear_num_heads", 32)),
        head_size=linear.integer("head_dim", config.integer("linear_head_dim", 128)),
        conv_width=read_conv_width(
            linear,
            "short_conv_kernel_size",
            read_conv_width(config, "linear_conv_kernel_dim", 4),
        ),
        norm=RMSNormSpec(eps=config.positive("rms_norm_eps", 1e-5), rounds_first=False),
    )
    elements = spec.num_heads * spec.head_size**2
    check_size("the number of heads of linear attention times head_dim²", elements, MOST_STATE)
    return spec


def _read_mixers(config: HFConfig) -> list[bool]:
    """Whether each layer has Kimi delta attention. Layers are numbered from one."""
    kinds, linear = read_kinds(config, (LINEAR,)), _linear(config)
    num_layers = config.integer("num_hidden_layers")
    numbers = [read_numbers(linear, name) for name in ("kda_layers", "full_attn_layers")]
    if not any(numbers):
        return kinds or [index % 4 != 0 or index == 0 for index in range(num_layers)]
    if sorted(numbers[0] + numbers[1]) != list(range(1, num_layers + 1)):
        raise CheckpointError(
            f"config.json: kda_layers={shown(numbers[0])} and full_attn_layers="
            f"{shown(numbers[1])} must have each of the layers 1 to {num_layers} once"
        )
    listed = [number in numbers[0] for number in range(1, num_layers + 1)]
    if kinds not in (None, listed):
        raise CheckpointError(
            "config.json: layer_types contradicts kda_layers and full_attn_layers in "
            "linear_attn_config"
        )
    return listed


def _read_dense(config: HFConfig) -> list[bool]:
    """Whether each layer has an MLP in place of experts."""
    num_layers = config.integer("num_hidden_layers")
    num_dense = config.integer("first_k_dense_replace", 1, lowest=0)
    kinds = config.names("mlp_layer_types")
    if kinds is None:
        return [index < num_dense for index in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= set(_KINDS_OF_FFNS):
        raise UnsupportedModelError(
            f"config.json: mlp_layer_types={shown(kinds)} is not supported; supported is "
            f"{' or '.join(_KINDS_OF_FFNS)} for each of the {num_layers} layers"
        )
    return [kind == "dense" for kind in kinds]


def _checkpoint(architecture: Architecture) -> CheckpointMap:
    names = with_latents(LLAMA_NAMES, architecture).with_rules(
        experts=each_expert("w1", "w3", "w2"),
        conv1d=taps_apart,
        fused_fg_a_proj=concatenated("f_a_proj", "g_a_proj"),
        self_attn=_rates,
    )
    names = names.with_names(mlp="block_sparse_moe")
    dense = [i for i, layer in enumerate(architecture.layers) if isinstance(layer.ffns[0], MLPSpec)]
    if not dense:
        return names
    # transformers saves dense layers under the name of those with experts.
    of_mlp = {
        "gate_up_proj": _in_mlp(names.rules["gate_up_proj"]),
        "down_proj": _in_mlp(as_named),
    }
    released = dataclasses.replace(
        names.with_rules(**of_mlp), told_by=(f"model.layers.{dense[0]}.mlp.down_proj.weight",)
    )
    return dataclasses.replace(released, others=(names,))


def _in_mlp(rule: Rule) -> Rule:
    """A rule for modules of dense layers, which are in `mlp`; shared MLPs are where they are."""

    def in_mlp(place: Place) -> Source:
        layer, _, last = place.parent.rpartition(".")
        if last == "block_sparse_moe":
            place = place._replace(parent=f"{layer}.mlp")
        return rule(place)

    return in_mlp


def _rates(place: Place) -> Source:
    """The rates of heads [N], which checkpoints have as [1, 1, N, 1]; the bias as it is."""
    if place.leaf != "A_log":
        return as_named(place)
    ((heads,),) = place.pieces
    return ViewedAs(place.plain_tensor(place.module, (1, 1, heads, 1)), (heads,))


FAMILY = Family(
    read=read,
    checkpoint=_checkpoint,
    tiny={
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        **dict.fromkeys(("rope_theta", "max_position_embeddings", "num_experts_per_tok")),
        "model_max_length": 2048,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_expert_group": 1,
        "routed_scaling_factor": 2.446,
        "linear_attn_config": {
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [3],
            "kda_layers": [1, 2, 4],
        },
    },
    # Decays of a few percent, so that early tokens matter.
    tiny_gains={"gate": 2.0, "self_attn": -1.0, "w1": 1.5, "w2": 1.5, "w3": 1.5},
    harmless=TRAINING
    | FOLLOWING
    | dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters"), "attention does not rotate")
    | dict.fromkeys(
        ("num_nextn_predict_layers", "num_mtp_layers"), "releases have no layers that draft"
    ),
)
