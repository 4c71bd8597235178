"""Mamba2 alone: a Mamba2 mixer in every layer, without attention and without MLPs."""

from jaxllm.layers.mamba import GatedNormSpec
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.models.blocks import SingleBlock
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import Family, read_decoder
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.read_recurrent import MAMBA_HARMLESS, final_norm_at, read_mamba, taps
from jaxllm.models.specs import Architecture, LayerSpec

# Of the class in transformers, but for the last: nothing in a config bounds sequences.
_DEFAULTS = {
    "num_heads": 128,
    "head_dim": 64,
    "n_groups": 8,
    "state_size": 128,
    "max_position_embeddings": 1 << 18,
}
NAMES = LLAMA_NAMES.with_rules(conv1d=taps, norm=final_norm_at("norm_f")).with_names(
    model="backbone", embed_tokens="embeddings", mamba="mixer", input_layernorm="norm"
)


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    eps = config.positive("layer_norm_epsilon", 1e-5)
    config.must_be("rms_norm", True)
    mamba = read_mamba(
        config.where(
            mamba_n_heads="num_heads",
            mamba_d_head="head_dim",
            mamba_n_groups="n_groups",
            mamba_d_state="state_size",
            mamba_d_conv="conv_kernel",
            mamba_expand="expand",
            mamba_conv_bias="use_conv_bias",
            mamba_proj_bias="use_bias",
        ),
        GatedNormSpec(eps=eps),
    )
    config.must_be("intermediate_size", mamba.num_heads * mamba.head_size)
    layer = LayerSpec(mixers=(mamba,), ffns=(), norm=RMSNormSpec(eps=eps), block=SingleBlock)
    return read_decoder(name, config, [layer] * config.integer("num_hidden_layers"))


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: NAMES,
    tiny={
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        **dict.fromkeys(
            (
                "intermediate_size",
                "num_attention_heads",
                "num_key_value_heads",
                "rms_norm_eps",
                "rope_theta",
                "max_position_embeddings",
            )
        ),
        "layer_norm_epsilon": 1e-5,
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 24,
    },
    tiny_gains={"mixer": -1.0},
    harmless=MAMBA_HARMLESS
    | {
        "norm_before_gate": "the class in transformers ignores it: gates come first",
        "residual_in_fp32": "the residual stream has the model's dtype",
    },
)
