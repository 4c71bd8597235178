"""BERT and models of its shape, such as MiniLM, BGE, E5 and GTE: an encoder with learned positions.

Embeddings of tokens, positions and types are added and normalised. Each layer normalises the sum of
its input and its output. A classifier has one more layer, with tanh, before it.
"""

import dataclasses

from jaxllm.layers.dense import DenseSpec
from jaxllm.layers.norm import LayerNormSpec
from jaxllm.layers.self_attention import SelfAttentionSpec
from jaxllm.models.blocks import ResidualNormBlock
from jaxllm.models.checkpoint_map import CheckpointMap, concatenated
from jaxllm.models.family import Family, read_attention, read_decoder, read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture, LayerSpec


def read(name: str, config: HFConfig) -> Architecture:
    return read_bert(name, config, first_position=0)


def read_bert(name: str, config: HFConfig, *, first_position: int) -> Architecture:
    """Read an encoder whose texts begin at a row of the table of positions."""
    config.must_be("position_embedding_type", "absolute")
    config.must_be("is_decoder", False)
    heads = read_attention(config, rotates=False)
    attention = SelfAttentionSpec(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        scale=heads.scale,
        qkv_bias=True,
        o_bias=True,
    )
    mlp = read_mlp(config, bias=True, is_gated=False, default_activation="gelu")
    norm = LayerNormSpec(eps=config.positive("layer_norm_eps", 1e-12))
    layer = LayerSpec(mixers=(attention,), ffns=(mlp,), norm=norm, block=ResidualNormBlock)
    architecture = read_decoder(
        name,
        config,
        [layer] * config.integer("num_hidden_layers"),
        is_tied_by_default=True,
        num_positions=config.integer("max_position_embeddings"),
        first_position=first_position,
        num_token_types=config.integer("type_vocab_size", 2),
        embedding_norm=norm,
    )
    longest = architecture.max_model_len - first_position
    return dataclasses.replace(architecture, final_norm=None, max_model_len=longest)


def classifier(architecture: Architecture, num_labels: int) -> tuple[DenseSpec, ...]:
    return (
        DenseSpec(
            name="pooler_dense", out_size=architecture.hidden_size, bias=True, activation="tanh"
        ),
        DenseSpec(name="classifier", out_size=num_labels, bias=True),
    )


_NAMES = {
    "embed_tokens": "embeddings.word_embeddings",
    "embed_positions": "embeddings.position_embeddings",
    "embed_types": "embeddings.token_type_embeddings",
    "embed_norm": "embeddings.LayerNorm",
    "layers": "encoder.layer",
    "self_attn": "attention",
    "o_proj": "output.dense",
    "mlp": "",
    "up_proj": "intermediate.dense",
    "down_proj": "output.dense",
    "post_attention_layernorm": "attention.output.LayerNorm",
    "post_feedforward_layernorm": "output.LayerNorm",
}


def names_within(model: str) -> CheckpointMap:
    """The names of tensors where those of the encoder begin with a name. In a checkpoint of the
    encoder alone they do not, which the head of an embedder adds to the layouts."""
    return CheckpointMap(
        rules={"qkv_proj": concatenated("self.query", "self.key", "self.value")},
        renamed=_NAMES | {"model": model, "pooler_dense": f"{model}.pooler.dense"},
        ignored=(
            r"(.*\.)?embeddings\.position_ids",
            # Heads of the training, and a layer that only classifiers have.
            r"(.*\.)?pooler\..*",
            r"cls\..*",
        ),
    )


NAMES = names_within("bert")
FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: NAMES,
    tiny={"architectures": ["BertModel"], "model_type": "bert"},
    is_encoder=True,
    pools_by="CLS",
    classifier=classifier,
)
