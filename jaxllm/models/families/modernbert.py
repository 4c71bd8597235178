"""ModernBERT and its embedders: an encoder with rotations, gates, and a window in most layers.

Embeddings are normalised, so the first layer has no norm before its attention. Every third layer
sees whole texts and rotates with a long base. A window lies half on each side of a token.
"""

from jaxllm.layers.dense import DenseSpec, HeadNormSpec
from jaxllm.layers.norm import LayerNormSpec
from jaxllm.layers.self_attention import SelfAttentionSpec
from jaxllm.models.blocks import InnerNormBlock, PreNormBlock
from jaxllm.models.checkpoint_map import CheckpointMap
from jaxllm.models.family import FULL, SLIDING, Family, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture, LayerSpec


def read(name: str, config: HFConfig) -> Architecture:
    mlp = read_mlp(
        config,
        bias=config.flag("mlp_bias"),
        activation="hidden_activation",
        default_activation="gelu",
    )
    norm = LayerNormSpec(
        eps=config.positive("norm_eps", 1e-5), has_bias=config.flag("norm_bias", False)
    )
    num_layers = config.integer("num_hidden_layers")
    every = config.integer("global_attn_every_n_layers", 3)
    kinds = config.layer_types(num_layers, supported=(FULL, SLIDING)) or [
        SLIDING if index % every else FULL for index in range(num_layers)
    ]
    layers = [
        LayerSpec(
            mixers=(_read_attention(config, kind),),
            ffns=(mlp,),
            norm=norm,
            block=PreNormBlock if index else InnerNormBlock,
        )
        for index, kind in enumerate(kinds)
    ]
    return read_decoder(name, config, layers, is_tied_by_default=True, embedding_norm=norm)


def _read_attention(config: HFConfig, kind: str) -> SelfAttentionSpec:
    is_full, bias = kind == FULL, config.flag("attention_bias")
    heads = read_attention(
        config,
        layer_type=kind,
        default_theta=1.6e5 if is_full else 1e4,
        theta_field="global_rope_theta" if is_full else "local_rope_theta",
    )
    local = config.integer("local_attention", 128)
    return SelfAttentionSpec(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        scale=heads.scale,
        rope=heads.rope,
        reach=None if is_full else local // 2,
        qkv_bias=bias,
        o_bias=bias,
    )


def classifier(architecture: Architecture, num_labels: int) -> tuple[DenseSpec | HeadNormSpec, ...]:
    fields, size = architecture.hf_config, architecture.hidden_size
    norm = architecture.final_norm
    assert norm is not None
    return (
        DenseSpec(
            name="head_dense",
            out_size=size,
            bias=bool(fields.get("classifier_bias", False)),
            activation=str(fields.get("classifier_activation", "gelu")),
        ),
        HeadNormSpec(name="head_norm", out_size=size, norm=norm),
        DenseSpec(name="classifier", out_size=num_labels, bias=True),
    )


NAMES = CheckpointMap(
    renamed={
        "embed_tokens": "embeddings.tok_embeddings",
        "embed_norm": "embeddings.norm",
        "self_attn": "attn",
        "qkv_proj": "Wqkv",
        "o_proj": "Wo",
        "gate_up_proj": "Wi",
        "down_proj": "Wo",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "mlp_norm",
        "norm": "final_norm",
        "head_dense": "head.dense",
        "head_norm": "head.norm",
    },
    # Of the training.
    ignored=(r"(head|decoder)\..*",),
)
FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: NAMES,
    tiny={"architectures": ["ModernBertModel"], "model_type": "modernbert"},
    is_encoder=True,
    pools_by="CLS",
    classifier=classifier,
    harmless={
        "layer_norm_eps": "of BERT; norm_eps is read",
        "position_embedding_type": "of BERT; positions are rotations here",
        "cls_token_id": "an id of a token; prompts contain it already",
        **dict.fromkeys(
            ("classifier_bias", "classifier_activation", "classifier_pooling", "decoder_bias"),
            "of a head, which is read where there is one",
        ),
        **dict.fromkeys(
            ("deterministic_flash_attn", "reference_compile"), "how transformers computes, not what"
        ),
        **dict.fromkeys(
            (
                "mlp_dropout",
                "sparse_prediction",
                "sparse_pred_ignore_index",
                "initializer_cutoff_factor",
                "repad_logits_with_grad",
            ),
            "acts in training only",
        ),
    },
)
