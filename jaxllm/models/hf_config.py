"""Reads the fields of a config.json; what is missing, malformed or not supported is said by name.

A field that older configs leave out has the default of transformers.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from jaxllm.errors import CheckpointError, UnsupportedModelError

_DTYPES = ("float32", "bfloat16", "float16")


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
                f"config.json: {name}={value!r} must be an integer, at least {lowest}"
            )
        return value

    def positive(self, name: str, default: float) -> float:
        value = self.get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise CheckpointError(f"config.json: {name}={value!r} must be a number above zero")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name}={value!r} must be true or false")
        return value

    def names(self, name: str) -> list[str] | None:
        """A list of strings, if it is given."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise CheckpointError(f"config.json: {name}={value!r} must be a list of names")
        return list(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, or a list of them."""
        value = self.get(name)
        ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise CheckpointError(
                f"config.json: {name}={value!r} must be a token id or a list of them"
            )
        return ids

    @property
    def dtype(self) -> str:
        # "torch_dtype" until transformers 4.55.
        name = str(self.get("dtype") or self.get("torch_dtype") or "float32")
        name = name.removeprefix("torch.")
        if name not in _DTYPES:
            raise UnsupportedModelError(
                f"dtype {name} of the checkpoint is not supported; supported are "
                f"{', '.join(_DTYPES)}"
            )
        return name

    def layer_types(self, num_layers: int, *, supported: Collection[str]) -> list[str] | None:
        """The kind of every layer, if they are given."""
        kinds = self.names("layer_types")
        if kinds is None:
            return None
        if len(kinds) != num_layers:
            raise CheckpointError(
                f"config.json: layer_types has {len(kinds)} entries for "
                f"num_hidden_layers={num_layers}"
            )
        unknown = sorted(set(kinds) - set(supported))
        if unknown:
            raise UnsupportedModelError(
                f"layer type {', '.join(unknown)} is not supported; supported are "
                f"{' and '.join(supported)}"
            )
        return kinds

    def refuse_unsupported(self) -> None:
        """Refuse what no family supports."""
        quantization = self.get("quantization_config") or self.get("compression_config")
        if quantization:
            if not isinstance(quantization, Mapping):
                raise CheckpointError(
                    f"config.json: quantization_config={quantization!r} must be an object"
                )
            method = quantization.get("quant_method", "of unknown kind")
            raise UnsupportedModelError(
                f"quantization_config {method} is not supported; supported are unquantised "
                f"checkpoints in {', '.join(_DTYPES)}"
            )
        activation = self.get("hidden_act", "silu")
        if activation != "silu":
            raise UnsupportedModelError(
                f"hidden_act {activation!r} is not supported; supported is 'silu'"
            )
        is_causal = self.get("is_causal", True)
        if is_causal is not True:
            raise UnsupportedModelError(
                f"is_causal={is_causal!r} is not supported: a token sees only what is before it"
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
