"""Hunyuan V1, dense: Llama with norms of queries and keys behind their rotation.

Rope type "dynamic" with an `alpha` means a base that is stretched once, for all lengths.
"""

from jaxllm.layers.attention import AttentionSpec, QKNorm
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import (
    Family,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_mlp,
    read_norm,
)
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture

# Of the class in transformers, where they are not those that most families share.
_DEFAULTS = {"rms_norm_eps": 1e-5}
NAMES = LLAMA_NAMES.with_names(q_norm="query_layernorm", k_norm="key_layernorm")
# Fields of released configs that no reader needs.
HARMLESS: dict[str, str] = {
    **dict.fromkeys(
        ("eod_token_id", "pad_id", "im_start_id", "im_end_id", "im_newline_id"),
        "ids of tokens; prompts contain them already",
    ),
    **dict.fromkeys(
        ("text_start_id", "text_end_id", "mask_init_id"),
        "ids of tokens; prompts contain them already",
    ),
    **dict.fromkeys(
        ("dense_list", "pool_type", "class_num"), "of a classifier, which a decoder lacks"
    ),
    "cla_share_factor": "counts only with use_cla, which is refused",
    "enable_lm_head_fp32": "logits are summed in float32",
    "org_vocab_size": "the vocabulary without padding; vocab_size is the size of tensors",
}


def read(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    config.must_be("num_experts", 1)
    layer = pre_norm_layer(config, read_hunyuan_attention(config), read_mlp(config))
    return read_decoder(name, config, [layer] * config.integer("num_hidden_layers"))


def read_hunyuan_attention(config: HFConfig) -> AttentionSpec:
    """Read the attention of Hunyuan V1, and refuse other designs."""
    bias = config.flag("attention_bias")
    attention = read_attention(
        config,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=QKNorm(norm=read_norm(config), after_rope=True),
        other_parameters=("alpha",),
    )
    _refuse_other_designs(config, attention.head_size)
    return attention


def _refuse_other_designs(config: HFConfig, head_size: int) -> None:
    """Released configs have fields of other models of the same makers."""
    config.must_be("attention_head_dim", head_size)
    config.must_be("norm_type", "rms", "hf_rms", "fused")
    for asked in ("use_qk_norm", "use_rotary_pos_emb"):
        config.must_be(asked, True)
    for other in ("use_cla", "mlp_bias", "add_classification_head", "position_embedding_xdrope"):
        config.must_be(other, False)


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: NAMES,
    tiny={
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "model_type": "hunyuan_v1_dense",
        "head_dim": 24,
        "rope_scaling": {
            "type": "dynamic",
            "alpha": 1000.0,
            "factor": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    harmless=HARMLESS,
)
