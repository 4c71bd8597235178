"""What a family of models is, and the parts of a config that most families share."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.layers.activation import ACTIVATIONS
from jaxllm.layers.attention import AttentionSpec, QKNorm, Temperature
from jaxllm.layers.dense import DenseSpec, HeadNormSpec
from jaxllm.layers.mlp import MLPSpec
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.models.blocks import PreNormBlock
from jaxllm.models.checkpoint_map import CheckpointMap, rotated_in_pairs
from jaxllm.models.draft_head import HeadSpec
from jaxllm.models.hf_config import HFConfig, check_size
from jaxllm.models.rope_parameters import read_rope, rope_number, stretched_length
from jaxllm.models.specs import Architecture, FFNSpec, LayerSpec, MixerSpec
from jaxllm.models.tower import TowerSpec
from jaxllm.pooler_config import SeqPooling

# Types of layers, as `layer_types` in a config.json names them.
FULL, SLIDING = "full_attention", "sliding_attention"

_MAX_HEADS_SIZE = 1 << 20  # of all heads of a layer together
_MAX_MATRIX_SIZE = 1 << 36  # elements


def _score(architecture: Architecture, num_labels: int) -> tuple[DenseSpec, ...]:
    """The layer that classifies with a decoder."""
    return (DenseSpec(name="score", out_size=num_labels, bias=False),)


@dataclass(frozen=True, kw_only=True)
class Family:
    """The models that one file of `jaxllm.models.families` describes."""

    # Name of the architecture, config.json -> the computation.
    read: Callable[[str, HFConfig], Architecture]
    # The computation -> the places of its parameters in a checkpoint.
    checkpoint: Callable[[Architecture], CheckpointMap]
    # For the tiny checkpoint in tests: fields of config.json that differ from Llama's. None: the
    # family does not have the field.
    tiny: Mapping[str, Any]
    # Likewise, how far the outputs of modules spread, where it is not as in `jaxllm.testing`.
    tiny_gains: Mapping[str, float] = field(default_factory=dict)
    # Fields of config.json that no reader needs, beside those of `jaxllm.models.harmless`, and why.
    harmless: Mapping[str, str] = field(default_factory=dict)
    # Whether tokens see those behind them, so that the models generate nothing.
    is_encoder: bool = False
    # How a prompt is pooled if nothing says otherwise, and, from the computation and the number of
    # classes, the layers that classify it.
    pools_by: SeqPooling = "LAST"
    classifier: Callable[[Architecture, int], tuple[DenseSpec | HeadNormSpec, ...]] = _score
    # The computation -> the head in the same checkpoint that drafts (speculation's method "mtp");
    # it raises an error if the model has none. None: no model of the family has one.
    draft_head: Callable[[Architecture], HeadSpec] | None = None
    # config.json and what was read of it -> the tower for images. None: prompts are text, also if a
    # checkpoint has a tower.
    tower: Callable[[HFConfig, Architecture], TowerSpec] | None = None
    # For the tiny checkpoint with a tower: fields around the decoder's config, the contents of
    # preprocessor_config.json, and the tokens that the tokenizer has for images.
    tiny_config_around: Mapping[str, Any] = field(default_factory=dict)
    tiny_preprocessor: Mapping[str, Any] = field(default_factory=dict)
    tiny_image_tokens: tuple[str, ...] = ()


def read_attention(
    config: HFConfig,
    *,
    default_head_size: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: QKNorm | None = None,
    rotates: bool = True,
    may_rotate_a_part: bool = False,
    **rope_options: Any,
) -> AttentionSpec:
    """Read grouped-query attention without a window, from the usual field names.

    `rope_options` are those of `read_rope`.
    """
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    head_size = _read_head_size(config, num_heads, default_head_size)
    check_size("num_attention_heads times head_dim", num_heads * head_size, _MAX_HEADS_SIZE)
    rope = None
    if rotates:
        rope = read_rope(
            config, head_size=head_size, may_be_partial=may_rotate_a_part, **rope_options
        )
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        scale=head_size**-0.5,
        rope=rope,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
    )


def read_mlp(
    config: HFConfig,
    *,
    bias: bool = False,
    is_gated: bool = True,
    activation: str = "hidden_act",
    default_activation: str = "silu",
    default_size: int | None = None,
) -> MLPSpec:
    """Read an MLP; `activation` is the field that names its function."""
    size = config.integer("intermediate_size", default_size)
    of_matrix = size * config.integer("hidden_size")
    check_size("intermediate_size times hidden_size", of_matrix, _MAX_MATRIX_SIZE)
    function = config.get(activation) or default_activation
    if not isinstance(function, str) or function not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{activation} {shown(function)} is not supported; supported are "
            f"{', '.join(ACTIVATIONS)}"
        )
    return MLPSpec(intermediate_size=size, bias=bias, is_gated=is_gated, activation=function)


def read_temperature(config: HFConfig) -> Temperature | None:
    """Read by how much queries grow with their position, as in Mistral's newer models."""
    strength = rope_number(config, "llama_4_scaling_beta")
    if strength is None:
        return None
    trained = rope_number(config, "original_max_position_embeddings")
    interval = config.integer("max_position_embeddings") if trained is None else int(trained)
    return Temperature(strength=strength, interval=interval)


def read_norm(config: HFConfig) -> RMSNormSpec:
    return RMSNormSpec(eps=config.positive("rms_norm_eps", 1e-6))


def read_window(config: HFConfig) -> int | None:
    """The window of the layers that have one; None: a token sees all before it."""
    return None if config.get("sliding_window") is None else config.integer("sliding_window")


def windows_of(kinds: Collection[str], window: int | None) -> list[int | None]:
    """The window of each layer, if those of one type have it."""
    if window is None and SLIDING in kinds:
        raise CheckpointError(
            "config.json: layer_types asks for sliding_attention, but use_sliding_window or "
            "sliding_window is not set"
        )
    return [window if kind == SLIDING else None for kind in kinds]


def pre_norm_layer(config: HFConfig, attention: MixerSpec, ffn: FFNSpec) -> LayerSpec:
    """Llama's layer."""
    return LayerSpec(mixers=(attention,), ffns=(ffn,), norm=read_norm(config), block=PreNormBlock)


def read_decoder(
    name: str,
    config: HFConfig,
    layers: Iterable[LayerSpec],
    *,
    is_tied_by_default: bool = False,
    **others: Any,
) -> Architecture:
    """Read a decoder of these layers, whose final norm is of the same kind as theirs.

    The other fields have their usual names; `others` are fields of the Architecture.
    """
    layers = tuple(layers)
    max_position = config.integer("max_position_embeddings")
    vocab_size, hidden_size = config.integer("vocab_size"), config.integer("hidden_size")
    check_size("vocab_size times hidden_size", vocab_size * hidden_size, _MAX_MATRIX_SIZE)
    lengths = {stretched_length(layer.rope, max_position) for layer in layers if layer.rope}
    return Architecture(
        name=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=layers,
        final_norm=layers[-1].norm,
        tie_word_embeddings=config.flag("tie_word_embeddings", is_tied_by_default),
        max_model_len=max(lengths, default=max_position),
        dtype=config.dtype,
        eos_token_ids=config.token_ids("eos_token_id"),
        hf_config=config.fields,
        **others,
    )


def with_rotated_pairs(names: CheckpointMap, architecture: Architecture) -> CheckpointMap:
    """The map for checkpoints whose heads rotate neighbours, not one half with the other."""
    mixers = (mixer for layer in architecture.layers for mixer in layer.mixers)
    attention = next((mixer for mixer in mixers if mixer.rope is not None), None)
    if attention is None:
        return names
    assert isinstance(attention, AttentionSpec) and attention.rope is not None
    return names.with_rules(qkv_proj=rotated_in_pairs(attention.head_size, attention.rope.size))


def _read_head_size(config: HFConfig, num_heads: int, default: int | None) -> int:
    if config.get("head_dim") is not None:
        return config.integer("head_dim")
    if default is not None:
        return default
    hidden_size = config.integer("hidden_size")
    if hidden_size % num_heads:
        raise CheckpointError(
            f"config.json: hidden_size={hidden_size} is not a multiple of "
            f"num_attention_heads={num_heads}, and head_dim is not given"
        )
    return hidden_size // num_heads
