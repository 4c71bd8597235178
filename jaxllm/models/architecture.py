"""From config.json to a frozen `Architecture`: the only reader of Hugging Face's field names.

The plan reads it before anything is loaded, so whatever we cannot run is refused here, by name.
A field that older configs leave out has the default of transformers.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.layers.rope import RopeConfig
from jaxllm.models.registry import ModelRegistry
from jaxllm.models.rope_parameters import MAX_POSITIONS, read_rope

_DTYPES = ("float32", "bfloat16", "float16")
# What is above has no model, and nobody's memory: it is refused before anything is made of it.
_HIGHEST = {
    "num_hidden_layers": 4096,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 1 << 13,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 22,
    "vocab_size": 1 << 24,
    "max_position_embeddings": MAX_POSITIONS,
    "sliding_window": MAX_POSITIONS,
    "max_window_layers": MAX_POSITIONS,
    "rms_norm_eps": 1.0,
}
_MAX_HEADS_SIZE = 1 << 20  # of all heads of a layer together
_MAX_MATRIX_SIZE = 1 << 36  # elements
_MAX_EOS_TOKEN_IDS = 1024


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """All that a config.json says about the computation; hashable and static."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    hidden_act: str
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    # Per layer: how many tokens, itself included, a token sees; None: all before it.
    layer_windows: tuple[int | None, ...]
    rope: RopeConfig
    max_model_len: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    # What it was read from, for models from outside with fields of their own.
    hf_config: Mapping[str, Any] = field(repr=False, compare=False)


def read_architecture(
    hf_config: Mapping[str, Any], *, overrides: Mapping[str, Any] | None = None
) -> Architecture:
    """Read the contents of a config.json, some of its fields replaced by overrides."""
    config = merge_overrides(hf_config, overrides or {})
    names = config.get("architectures") or ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"config.json: architectures={shown(names)} must be a list of names")
    name = ModelRegistry.select(names)
    _refuse_unsupported(config)
    hidden_size = _integer(config, "hidden_size")
    num_layers = _integer(config, "num_hidden_layers")
    num_heads = _integer(config, "num_attention_heads")
    num_kv_heads = _integer(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    head_size = _head_size(config, name, hidden_size, num_heads)
    vocab_size = _integer(config, "vocab_size")
    intermediate_size = _integer(config, "intermediate_size")
    for what, size, most in (
        ("num_attention_heads times head_dim", num_heads * head_size, _MAX_HEADS_SIZE),
        ("vocab_size times hidden_size", vocab_size * hidden_size, _MAX_MATRIX_SIZE),
        ("intermediate_size times hidden_size", intermediate_size * hidden_size, _MAX_MATRIX_SIZE),
    ):
        if size > most:
            raise CheckpointError(f"config.json: {what} is {size}; at most {most} is supported")
    max_len = _integer(config, "max_position_embeddings")
    rope, max_model_len = read_rope(config, head_size=head_size, max_position_embeddings=max_len)
    traits = _TRAITS.get(name, _llama_traits)(config, num_layers)
    return Architecture(
        name=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rms_norm_eps=_positive(config, "rms_norm_eps", 1e-6),
        hidden_act="silu",
        qkv_bias=traits.qkv_bias,
        o_bias=traits.o_bias,
        mlp_bias=traits.mlp_bias,
        qk_norm=traits.qk_norm,
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        layer_windows=traits.layer_windows,
        rope=rope,
        max_model_len=max_model_len,
        dtype=_dtype(config),
        eos_token_ids=_token_ids(config, "eos_token_id"),
        hf_config=config,
    )


def merge_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Replace fields; objects are merged field by field."""
    merged = dict(config)
    for name, value in overrides.items():
        old = merged.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merge_overrides(old, value)
        merged[name] = value
    return merged


# ---- what is particular to a family


class _Traits(NamedTuple):
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]


def _llama_traits(config: Mapping[str, Any], num_layers: int) -> _Traits:
    bias = _flag(config, "attention_bias")
    return _Traits(bias, bias, _flag(config, "mlp_bias"), False, (None,) * num_layers)


def _mistral_traits(config: Mapping[str, Any], num_layers: int) -> _Traits:
    window = None
    if config.get("sliding_window", 4096) is not None:
        window = _integer(config, "sliding_window", 4096)
    kind = "full_attention" if window is None else "sliding_attention"
    if set(_layer_types(config, num_layers) or ()) - {kind}:
        raise UnsupportedModelError(
            "layer_types that differ between layers are not supported for MistralForCausalLM"
        )
    return _Traits(False, False, False, False, (window,) * num_layers)


def _qwen2_traits(config: Mapping[str, Any], num_layers: int) -> _Traits:
    return _Traits(True, False, False, False, _qwen_windows(config, num_layers))


def _qwen3_traits(config: Mapping[str, Any], num_layers: int) -> _Traits:
    bias = _flag(config, "attention_bias")
    return _Traits(bias, bias, False, True, _qwen_windows(config, num_layers))


def _qwen_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = None
    if _flag(config, "use_sliding_window") and config.get("sliding_window", 4096) is not None:
        window = _integer(config, "sliding_window", 4096)
    kinds = _layer_types(config, num_layers)
    if kinds is None:
        # The first layers see everything, the rest only the window.
        first = _integer(config, "max_window_layers", 28, lowest=0)
        return tuple(None if layer < first else window for layer in range(num_layers))
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(
            f"layer type {', '.join(unknown):.80} is not supported; supported are full_attention "
            "and sliding_attention"
        )
    if window is None and "sliding_attention" in kinds:
        raise CheckpointError(
            "config.json: layer_types asks for sliding_attention, but use_sliding_window or "
            "sliding_window is not set"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _layer_types(config: Mapping[str, Any], num_layers: int) -> list[str] | None:
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise CheckpointError(f"config.json: layer_types={shown(kinds)} must be a list of names")
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"config.json: layer_types has {len(kinds)} entries for num_hidden_layers={num_layers}"
        )
    return kinds


_TRAITS: dict[str, Callable[[Mapping[str, Any], int], _Traits]] = {
    "LlamaForCausalLM": _llama_traits,
    "MistralForCausalLM": _mistral_traits,
    "Qwen2ForCausalLM": _qwen2_traits,
    "Qwen3ForCausalLM": _qwen3_traits,
}


# ---- single fields


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        if not isinstance(quantization, Mapping):
            raise CheckpointError(
                f"config.json: quantization_config={shown(quantization)} must be an object"
            )
        method = quantization.get("quant_method", "of unknown kind")
        raise UnsupportedModelError(
            f"quantization_config {method!s:.80} is not supported; supported are unquantised "
            f"checkpoints in {', '.join(_DTYPES)}"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(
            f"hidden_act {shown(activation)} is not supported; supported is 'silu'"
        )
    is_causal = config.get("is_causal", True)
    if is_causal is not True:
        raise UnsupportedModelError(
            f"is_causal={shown(is_causal)} is not supported: a token sees only what is before it"
        )


def _integer(
    config: Mapping[str, Any], name: str, default: int | None = None, *, lowest: int = 1
) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json: {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise CheckpointError(
            f"config.json: {name}={shown(value)} must be an integer, at least {lowest}"
        )
    _check_highest(name, value)
    return value


def _positive(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {name}={shown(value)} must be a number above zero")
    _check_highest(name, value)
    return float(value)


def _check_highest(name: str, value: float) -> None:
    if value > _HIGHEST[name]:
        raise CheckpointError(
            f"config.json: {name}={shown(value)} is too large; at most {_HIGHEST[name]} is "
            "supported"
        )


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name}={shown(value)} must be true or false")
    return value


def _head_size(config: Mapping[str, Any], name: str, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return _integer(config, "head_dim")
    if name == "Qwen3ForCausalLM":
        return 128
    if hidden_size % num_heads:
        raise CheckpointError(
            f"config.json: hidden_size={hidden_size} is not a multiple of "
            f"num_attention_heads={num_heads}, and head_dim is not given"
        )
    return hidden_size // num_heads


def _dtype(config: Mapping[str, Any]) -> str:
    # "torch_dtype" until transformers 4.55.
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    name = name.removeprefix("torch.")
    if name not in _DTYPES:
        raise UnsupportedModelError(
            f"dtype {name:.80} of the checkpoint is not supported; supported are "
            f"{', '.join(_DTYPES)}"
        )
    return name


def _token_ids(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = config.get(name)
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise CheckpointError(
            f"config.json: {name}={shown(value)} must be a token id or a list of them"
        )
    if len(ids) > _MAX_EOS_TOKEN_IDS:
        raise CheckpointError(
            f"config.json: {name} has {len(ids)} token ids; at most {_MAX_EOS_TOKEN_IDS} are "
            "supported"
        )
    return ids
