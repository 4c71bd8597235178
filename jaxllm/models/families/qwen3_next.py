"""Qwen3-Next and Qwen3-Coder-Next: experts, and a gated delta net in three layers of four.

The others have attention, with a gate for every output, and rotate a quarter of each head. Weights
of norms are stored around zero, except for those in the delta nets. Releases have one more layer,
with attention, which drafts tokens if it is asked to; else it is left out.
"""

import dataclasses

from jaxllm.layers.attention import AttentionSpec, QKNorm
from jaxllm.layers.gated_delta import GatedDeltaSpec
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.models.blocks import PreNormBlock
from jaxllm.models.checkpoint_map import LLAMA_NAMES, CheckpointMap
from jaxllm.models.draft_head import HeadSpec
from jaxllm.models.expert_tensors import each_expert
from jaxllm.models.families.qwen3_moe import read_router
from jaxllm.models.family import Family, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.mtp import beside_decoder
from jaxllm.models.read_moe import TRAINING, read_moe, read_numbers
from jaxllm.models.read_recurrent import LINEAR, from_groups, read_gated_delta, read_kinds, taps
from jaxllm.models.specs import Architecture, FFNSpec, LayerSpec

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 5632,
    "max_position_embeddings": 32_768,
    "norm_topk_prob": True,
}
# Tensors of the layers that draft.
DRAFTS = r"mtp\..*"


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    step, dense = config.integer("decoder_sparse_step", 1), read_numbers(config, "mlp_only_layers")
    mlp, moe = read_mlp(config), read_shared_moe(config)
    num_layers = config.integer("num_hidden_layers")
    ffns = [mlp if i in dense or (i + 1) % step else moe for i in range(num_layers)]
    return read_hybrid(name, config, ffns)


def read_shared_moe(config: HFConfig, *, always_normalises: bool = False) -> FFNSpec:
    """Experts, and beside them an MLP behind a gate."""
    router = read_router(config)
    if always_normalises:
        router = dataclasses.replace(router, normalises=True)
    size = config.integer("shared_expert_intermediate_size", 512)
    shared = read_mlp(config, default_size=size)
    return read_moe(
        config,
        router,
        shared=dataclasses.replace(shared, intermediate_size=size),
        gates_shared=True,
    )


def read_hybrid(name: str, config: HFConfig, ffns: list[FFNSpec]) -> Architecture:
    """Read a Qwen of gated delta nets and gated attention, with these ffns."""
    norm = RMSNormSpec(eps=config.positive("rms_norm_eps", 1e-6), offset=1.0, rounds_first=False)
    attention, delta = _read_attention(config, norm), read_gated_delta(config)
    kinds, interval = read_kinds(config, (LINEAR,)), config.integer("full_attention_interval", 4)
    if kinds is None:
        kinds = [(index + 1) % interval != 0 for index in range(len(ffns))]
    layers = [
        LayerSpec(
            mixers=(delta if is_recurrent else attention,),
            ffns=(ffn,),
            norm=norm,
            block=PreNormBlock,
        )
        for is_recurrent, ffn in zip(kinds, ffns, strict=True)
    ]
    return read_decoder(name, config, layers)


def _read_attention(config: HFConfig, norm: RMSNormSpec) -> AttentionSpec:
    bias = config.flag("attention_bias")
    attention = read_attention(
        config,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=QKNorm(norm=norm),
        may_rotate_a_part=True,
        default_share=0.25,
        # Sections of positions in images. Those of a token of text are all the same.
        other_parameters=("mrope_section", "mrope_interleaved"),
    )
    return dataclasses.replace(attention, has_output_gate=True)


def _checkpoint(architecture: Architecture) -> CheckpointMap:
    rules = {"experts": each_expert(), "conv1d": taps}
    mixers = (mixer for layer in architecture.layers for mixer in layer.mixers)
    delta = next((mixer for mixer in mixers if isinstance(mixer, GatedDeltaSpec)), None)
    if delta is not None:
        for module in ("in_proj_qkvz", "in_proj_ba"):
            rules[module] = from_groups(module, delta.num_key_heads)
    names = LLAMA_NAMES.with_rules(**rules).with_names(shared_experts="shared_expert")
    return names.ignoring(DRAFTS)


def _draft_head(architecture: Architecture) -> HeadSpec:
    names = _checkpoint(architecture)
    return beside_decoder(architecture, names, counted_by="num_nextn_predict_layers")


FAMILY = Family(
    read=read,
    checkpoint=_checkpoint,
    tiny={
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    # Decays of a few percent, so that early tokens matter. Weights of norms in delta nets are near
    # one, since a norm's weight is stored without the one that others add.
    tiny_gains={"gate": 2.0, "linear_attn": -1.0, "norm": 2.0},
    harmless=TRAINING
    | dict.fromkeys(
        ("num_nextn_predict_layers", "mtp_use_dedicated_embeddings"),
        "of the layer that drafts tokens if it is asked to",
    ),
    draft_head=_draft_head,
)
