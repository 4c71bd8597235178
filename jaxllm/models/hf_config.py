"""Reads the fields of a config.json. An error names the field that is missing, malformed or not
supported.

A field that older configs leave out has the default of transformers.
"""

import copy
import math
from collections.abc import Collection, Mapping, Set
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


# Fields of a decoder inside a larger model that may stand beside the decoder's.
_AT_EITHER_LEVEL = {
    "tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype", "quantization_config",
    "compression_config", "architectures",
}  # fmt: skip

# transformers 5 ties as the larger model's config says, and writes the class's default inside.
_RATHER_OUTSIDE = {"tie_word_embeddings"}


class HFConfig:
    """The contents of a config.json, and its fields with their types checked.

    It notes which fields are read. A field that changes the computation and that nobody reads would
    give wrong tokens, so others are refused, unless they are known to be harmless.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        outside: "HFConfig | None" = None,
        *,
        max_model_len: int | None = None,
    ):
        """Args:
        outside: the config that contains this one.
        max_model_len: the longest sequence that the user asks for; None: the longest possible.
        """
        self.fields = fields
        self.max_model_len = max_model_len
        self._outside = outside
        self._defaults: Mapping[str, Any] = {}
        self._other_names: Mapping[str, str] = {}
        self._read: set[str] = set()
        self._inside: dict[str, HFConfig] = {}

    def get(self, name: str, default: Any = None) -> Any:
        name = self._name(name)
        self._read.add(name)
        default = self._defaults.get(name, default)
        if self._outside is None or name not in _AT_EITHER_LEVEL:
            return self.fields.get(name, default)
        inside, outside = self.fields.get(name), self._outside.get(name)
        if name in _RATHER_OUTSIDE:
            inside, outside = outside, inside
        return next((value for value in (inside, outside) if value is not None), default)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "HFConfig":
        """The config with values for fields that it leaves out.

        The config of a decoder inside a larger model has only fields that differ from the defaults
        of its class in transformers.
        """
        config = copy.copy(self)
        config._defaults = defaults
        return config

    def where(self, **other_names: str) -> "HFConfig":
        """The same config for readers of usual names: usual name -> the name in this config.

        A field may still have its usual name, as in transformers.
        """
        config = copy.copy(self)
        config._other_names = other_names
        return config

    @property
    def fields_read(self) -> Set[str]:
        """The names of the fields that have been asked for."""
        return self._read

    def replaced(self, fields: Mapping[str, Any]) -> "HFConfig":
        """The config with other values of these fields: that of a layer unlike the others."""
        config = self.with_defaults(self._defaults)
        config.fields = {**self.fields, **fields}
        return config

    def inside(self, name: str) -> "HFConfig":
        """The config of a part of the model: that of the decoder beside towers for images."""
        fields = self.get(name)
        if not isinstance(fields, Mapping):
            raise CheckpointError(f"config.json: {name}={shown(fields)} must be an object")
        if name not in self._inside:
            self._inside[name] = HFConfig(fields, self, max_model_len=self.max_model_len)
            self._inside[name].refuse_unsupported()
        return self._inside[name]

    def must_be(self, name: str, *supported: Any) -> None:
        """Refuse a field that has another value than these; a missing or null field has none."""
        value = self.get(name)
        if value is not None and value not in supported:
            raise UnsupportedModelError(
                f"config.json: {name}={shown(value)} is not supported; supported is "
                f"{' or '.join(map(repr, supported))}"
            )

    def refuse_unread(self, harmless: Collection[str], path: tuple[str, ...] = ()) -> None:
        """Refuse fields that say something, and that are neither read nor harmless, in the config
        and in those inside it. `path` leads to this one."""
        for name, config in self._inside.items():
            config.refuse_unread(harmless, (*path, name))
        unknown = [
            name
            for name, value in self.fields.items()
            if value not in (None, [], {}) and name not in self._read and name not in harmless
        ]
        if unknown:
            name = unknown[0]
            override: dict[str, Any] = {name[:80]: None}
            for outer in reversed(path):
                override = {outer: override}
            raise UnsupportedModelError(
                f"config.json: {name:.80}={shown(self.fields[name])} is a field that this model's "
                f"family does not know{_and_others(unknown)}; if it does not change what is "
                f"computed, use hf_overrides={override}"
            )

    def _name(self, name: str) -> str:
        """The name that a field has in this config."""
        return name if name in self.fields else self._other_names.get(name, name)

    def integer(self, name: str, default: int | None = None, *, lowest: int = 1) -> int:
        usual, name = name, self._name(name)
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"config.json: {name} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise CheckpointError(
                f"config.json: {name}={shown(value)} must be an integer, at least {lowest}"
            )
        _check_highest(usual, name, value)
        return value

    def positive(self, name: str, default: float) -> float:
        usual, name = name, self._name(name)
        value = self.get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise CheckpointError(f"config.json: {name}={shown(value)} must be a number above zero")
        _check_highest(usual, name, value)
        return float(value)

    def optional_positive(self, name: str) -> float | None:
        """A number above zero; None if the field is missing or null."""
        return None if self.get(name) is None else self.positive(name, 1.0)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            value = default
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

    def token_id(self, name: str, default: int | None = None, *, vocab_size: int) -> int:
        """The id of a token that prompts have."""
        value = self.integer(name, default, lowest=0)
        if value >= vocab_size:
            raise CheckpointError(
                f"config.json: {self._name(name)}={value} must be below vocab_size={vocab_size}"
            )
        return value

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
        newer, older = self.get("dtype"), self.get("torch_dtype")
        name = str(newer or older or "float32")
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

    @property
    def quantization(self) -> Any:
        return self.get("quantization_config") or self.get("compression_config")

    def refuse_unsupported(self) -> None:
        """Refuse settings that no family supports."""
        if self._outside is not None and self.quantization and not self._outside.quantization:
            # Names of modules are those of the whole model.
            raise UnsupportedModelError(
                "quantization_config of a part of a model is not supported; beside the part it is"
            )
        if self.flag("is_encoder_decoder") or self.flag("add_cross_attention"):
            raise UnsupportedModelError("models with an encoder are not supported; decoders are")
        is_causal = self.get("is_causal", True)
        if is_causal is not True:
            raise UnsupportedModelError(
                f"is_causal={shown(is_causal)} is not supported: a token sees only those before it"
            )


def _and_others(names: list[str]) -> str:
    return f" ({', '.join(names[1:]):.200} likewise)" if len(names) > 1 else ""


def check_size(what: str, size: int, most: int) -> None:
    """Refuse a size that follows from several fields."""
    if size > most:
        raise CheckpointError(f"config.json: {what} is {size}; at most {most} is supported")


def _check_highest(usual_name: str, name: str, value: float) -> None:
    highest = _HIGHEST.get(usual_name, _HIGHEST_OTHER)
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
