"""Reads the fields of a config.json. An error names the field that is missing, malformed or not
supported.

A field that older configs leave out has the default of transformers.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown

_DTYPES = ("float32", "bfloat16", "float16")
# The longest sequence. Positions are int32; the limit leaves room to count beyond it.
MAX_POSITIONS = 1 << 30
# No model exceeds these. A config that does is refused before anything is allocated for it.
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
_HIGHEST_OTHER = 1 << 20  # of numbers with other names
_MAX_TOKEN_IDS = 1024


class HFConfig:
    """The contents of a config.json, and its fields with their types checked."""

    def __init__(self, fields: Mapping[str, Any]):
        self.fields = fields

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)

    def integer(self, name: str, default: int | None = None, *, lowest: int = 1) -> int:
        value = self.get(name)
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

    def positive(self, name: str, default: float) -> float:
        value = self.get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise CheckpointError(f"config.json: {name}={shown(value)} must be a number above zero")
        _check_highest(name, value)
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name}={shown(value)} must be true or false")
        return value

    def names(self, name: str) -> list[str] | None:
        """A list of strings; None if the field is missing."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise CheckpointError(f"config.json: {name}={shown(value)} must be a list of names")
        return list(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, or a list of them."""
        value = self.get(name)
        ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise CheckpointError(
                f"config.json: {name}={shown(value)} must be a token id or a list of them"
            )
        if len(ids) > _MAX_TOKEN_IDS:
            raise CheckpointError(
                f"config.json: {name} has {len(ids)} token ids; at most {_MAX_TOKEN_IDS} are "
                "supported"
            )
        return ids

    @property
    def dtype(self) -> str:
        # transformers up to 4.55 writes "torch_dtype".
        name = str(self.get("dtype") or self.get("torch_dtype") or "float32")
        name = name.removeprefix("torch.")
        if name not in _DTYPES:
            raise UnsupportedModelError(
                f"dtype {name:.80} of the checkpoint is not supported; supported are "
                f"{', '.join(_DTYPES)}"
            )
        return name

    def layer_types(
        self, num_layers: int, *, supported: Collection[str] | None = None
    ) -> list[str] | None:
        """The type of every layer; None if the config does not list them."""
        kinds = self.names("layer_types")
        if kinds is None:
            return None
        if len(kinds) != num_layers:
            raise CheckpointError(
                f"config.json: layer_types has {len(kinds)} entries for "
                f"num_hidden_layers={num_layers}"
            )
        if supported is not None and (unknown := sorted(set(kinds) - set(supported))):
            raise UnsupportedModelError(
                f"layer type {', '.join(unknown):.80} is not supported; supported are "
                f"{' and '.join(supported)}"
            )
        return kinds

    def refuse_unsupported(self) -> None:
        """Refuse settings that no family supports."""
        quantization = self.get("quantization_config") or self.get("compression_config")
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
        activation = self.get("hidden_act", "silu")
        if activation != "silu":
            raise UnsupportedModelError(
                f"hidden_act {shown(activation)} is not supported; supported is 'silu'"
            )
        is_causal = self.get("is_causal", True)
        if is_causal is not True:
            raise UnsupportedModelError(
                f"is_causal={shown(is_causal)} is not supported: a token sees only those before it"
            )


def check_size(what: str, size: int, most: int) -> None:
    """Refuse a size that follows from several fields."""
    if size > most:
        raise CheckpointError(f"config.json: {what} is {size}; at most {most} is supported")


def _check_highest(name: str, value: float) -> None:
    highest = _HIGHEST.get(name, _HIGHEST_OTHER)
    if value > highest:
        raise CheckpointError(
            f"config.json: {name}={shown(value)} is too large; at most {highest} is supported"
        )


def merge_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Replace fields of a config; merge nested objects field by field."""
    merged = dict(config)
    for name, value in overrides.items():
        old = merged.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merge_overrides(old, value)
        merged[name] = value
    return merged
