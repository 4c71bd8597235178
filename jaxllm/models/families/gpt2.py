"""GPT-2: learned positions in place of rotations, LayerNorms, biases, an MLP without a gate.

The head is the embedding. The layers' matrices are stored [in, out], those for queries, keys and
values as one. Released files name tensors from the decoder down; transformers writes them with the
decoder's name, `transformer`, before them. The fields of a config have names of their own.
"""

import dataclasses

from jaxllm.layers.norm import LayerNormSpec
from jaxllm.models.blocks import PreNormBlock
from jaxllm.models.checkpoint_map import CheckpointMap, Place, Rule, Source, Transposed
from jaxllm.models.family import Family, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture, LayerSpec


def read(name: str, config: HFConfig) -> Architecture:
    config = config.where(
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        intermediate_size="n_inner",
        max_position_embeddings="n_positions",
    )
    attention = read_attention(config, qkv_bias=True, o_bias=True, rotates=False)
    scale = attention.scale if config.flag("scale_attn_weights", True) else 1.0
    is_scaled_by_layer = config.flag("scale_attn_by_inverse_layer_idx")
    mlp = read_mlp(
        config,
        bias=True,
        is_gated=False,
        activation="activation_function",
        default_activation="gelu_new",
        default_size=4 * config.integer("hidden_size"),
    )
    norm = LayerNormSpec(eps=config.positive("layer_norm_epsilon", 1e-5))
    layers = []
    for number in range(1, config.integer("num_hidden_layers") + 1):
        its_scale = scale / number if is_scaled_by_layer else scale
        mixer = dataclasses.replace(attention, scale=its_scale)
        layers.append(LayerSpec(mixers=(mixer,), ffns=(mlp,), norm=norm, block=PreNormBlock))
    return read_decoder(
        name,
        config,
        layers,
        is_tied_by_default=True,
        num_positions=config.integer("max_position_embeddings"),
    )


def stored_in_out(module: str) -> Rule:
    """A rule for a module whose tensors have this name, and whose weight is stored [in, out]."""

    def rule(place: Place) -> Source:
        rows = sum(piece[0] for piece in place.pieces)
        columns = place.pieces[0][1:]
        tensor = place.plain_tensor(module, (*columns, rows))
        return Transposed(tensor) if columns else tensor

    return rule


_NAMES = {
    "embed_tokens": "wte",
    "embed_positions": "wpe",
    "layers": "h",
    "input_layernorm": "ln_1",
    "self_attn": "attn",
    "post_attention_layernorm": "ln_2",
    "norm": "ln_f",
}
_SAVED = CheckpointMap(
    rules={
        "qkv_proj": stored_in_out("c_attn"),
        "o_proj": stored_in_out("c_proj"),
        "up_proj": stored_in_out("c_fc"),
        "down_proj": stored_in_out("c_proj"),
    },
    renamed=_NAMES | {"model": "transformer"},
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),  # masks
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)
_RELEASED = dataclasses.replace(_SAVED, renamed=_NAMES | {"model": ""})
NAMES = dataclasses.replace(_SAVED, others=(_RELEASED,))


FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: NAMES,
    tiny={
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "hidden_size": None,
        "num_hidden_layers": None,
        "num_attention_heads": None,
        "num_key_value_heads": None,
        "intermediate_size": None,
        "max_position_embeddings": None,
        "hidden_act": None,
        "rms_norm_eps": None,
        "rope_theta": None,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 2048,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
    harmless={
        "n_ctx": "an older name of n_positions",
        "reorder_and_upcast_attn": "scores are computed in float32 with either value",
        "_num_labels": "of a classifier",
        "n_special": "tokens that the vocabulary already contains",
        "predict_special_tokens": "acts in training only: which tokens count in the loss",
        **dict.fromkeys(
            (
                "summary_type",
                "summary_use_proj",
                "summary_activation",
                "summary_proj_to_labels",
                "summary_first_dropout",
            ),
            "of a head that a language model does not have",
        ),
    },
)
