"""GPT-NeoX and Pythia: LayerNorms, biases and an MLP without a gate, a part of each head rotated.

Attention and MLP are side by side, each behind a norm of its own, or one behind the other if
`use_parallel_residual` is false. A checkpoint has one tensor for queries, keys and values, in which
those of a head are neighbours.
"""

from jaxllm.layers.attention import AttentionSpec
from jaxllm.layers.norm import LayerNormSpec
from jaxllm.models.blocks import PreNormBlock, TwoNormParallelBlock
from jaxllm.models.checkpoint_map import CheckpointMap, Place, Source
from jaxllm.models.family import Family, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.spans import in_spans
from jaxllm.models.specs import Architecture, LayerSpec


def read(name: str, config: HFConfig) -> Architecture:
    bias = config.flag("attention_bias", True)
    attention = read_attention(
        config,
        qkv_bias=bias,
        o_bias=bias,
        may_rotate_a_part=True,
        default_theta=config.positive("rotary_emb_base", 10_000.0),
        default_share=config.positive("rotary_pct", 0.25),
    )
    is_parallel = config.flag("use_parallel_residual", True)
    layer = LayerSpec(
        mixers=(attention,),
        ffns=(read_mlp(config, bias=True, is_gated=False, default_activation="gelu"),),
        norm=LayerNormSpec(eps=config.positive("layer_norm_eps", 1e-5)),
        block=TwoNormParallelBlock if is_parallel else PreNormBlock,
    )
    return read_decoder(name, config, [layer] * config.integer("num_hidden_layers"))


def checkpoint(architecture: Architecture) -> CheckpointMap:
    (attention,) = architecture.layers[0].mixers
    assert isinstance(attention, AttentionSpec)
    size, num_heads = attention.head_size, attention.num_heads

    def from_heads(place: Place) -> Source:
        rows = sum(piece[0] for piece in place.pieces)
        whole = place.tensor("query_key_value", (rows, *place.pieces[0][1:]))
        starts = [part * size + head * 3 * size for part in range(3) for head in range(num_heads)]
        return in_spans(whole, ((start, start + size) for start in starts))

    return CheckpointMap(
        rules={"qkv_proj": from_heads},
        renamed={
            "model": "gpt_neox",
            "embed_tokens": "embed_in",
            "self_attn": "attention",
            "o_proj": "dense",
            "up_proj": "dense_h_to_4h",
            "down_proj": "dense_4h_to_h",
            "norm": "final_layer_norm",
            "lm_head": "embed_out",
        },
        # Masks and tables that older versions of transformers wrote.
        ignored=(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
        copies={"lm_head.weight": "model.embed_tokens.weight"},
    )


FAMILY = Family(
    read=read,
    checkpoint=checkpoint,
    tiny={
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "num_key_value_heads": None,
        "hidden_act": "gelu",
        "rms_norm_eps": None,
        "rope_theta": None,
        "layer_norm_eps": 1e-5,
        "rotary_pct": 0.25,
        "rotary_emb_base": 5000,
    },
)
