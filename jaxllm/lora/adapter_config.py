"""Reads an adapter's adapter_config.json, and refuses what would be computed otherwise.

A field that says something and that nobody reads is refused: it may mean a computation that is not
ours.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.errors import ValidationError, shown
from jaxllm.files import read_json

CONFIG = "adapter_config.json"
_MAX_CONFIG_BYTES = 1 << 20
# Others initialise an adapter by taking it out of the weights, which PEFT does again on loading: no
# tensor tells that the base is another one.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
# Why a field is refused unless it is absent, null, false or empty.
_REFUSED = {
    "use_dora": "the norms of DoRA are not supported; train without use_dora",
    "lora_bias": "adapters with biases are not supported; train with lora_bias=False",
    "modules_to_save": "whole modules are not supported; merge the adapter into the model",
    "trainable_token_indices": "new embeddings of tokens are not supported; merge the adapter",
    "target_parameters": "adapters on the parameters of experts are not supported",
    "layer_replication": "a base with repeated layers is another model; merge the adapter",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "use_qalora": "QALoRA is not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "loftq_config": "LoftQ changes the weights of the base; merge the adapter into the model",
    "corda_config": "CorDA changes the weights of the base; merge the adapter into the model",
}
# Fields that say nothing about the computation, or only what the names of the tensors say, too.
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type",
    "peft_version", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform",
    "layers_pattern", "fan_in_fan_out", "bias", "eva_config", "megatron_config", "megatron_core",
    "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The part of an adapter_config.json that its matrices need."""

    path: Path
    rank: int
    alpha: float
    by_root: bool  # whether the scale is alpha over the root of the rank
    ranks: Mapping[str, int]  # of layers that differ, by a pattern of their names
    alphas: Mapping[str, float]

    def rank_of(self, layer: str) -> int:
        return _matching(self.ranks, layer, self.rank)

    def scale_of(self, layer: str) -> float:
        """The factor of B A."""
        rank, alpha = self.rank_of(layer), _matching(self.alphas, layer, self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)

    @classmethod
    def read(cls, directory: Path) -> "AdapterConfig":
        """Read and check the file; raise CheckpointError or ValidationError."""
        path = directory / CONFIG
        fields = read_json(path, most=_MAX_CONFIG_BYTES)
        kind = fields.pop("peft_type", None)
        if kind != "LORA":
            raise wrong(path, "peft_type", kind, "only 'LORA' is supported")
        for name, why in _REFUSED.items():
            if fields.get(name):
                raise wrong(path, name, fields[name], why)
        start = fields.pop("init_lora_weights", True)
        if start not in _PLAIN_STARTS:
            raise wrong(
                path,
                "init_lora_weights",
                start,
                "it changes the weights of the base, and no tensor says how; save it with PEFT's "
                "path_initial_model_for_weight_conversion, or merge it into the model",
            )
        config = cls(
            path=path,
            rank=_rank(path, "r", fields.pop("r", 8)),
            alpha=_number(path, "lora_alpha", fields.pop("lora_alpha", 8)),
            by_root=_flag(path, "use_rslora", fields.pop("use_rslora", False)),
            ranks=_patterns(path, "rank_pattern", fields.pop("rank_pattern", None), _rank),
            alphas=_patterns(path, "alpha_pattern", fields.pop("alpha_pattern", None), _number),
        )
        for name, value in fields.items():
            if value and name not in _HARMLESS:
                raise wrong(path, name, value, "this field of PEFT's config is not supported")
        return config


def wrong(path: Path, name: str, value: object, why: str) -> ValidationError:
    """Make the error for an adapter that is refused: file, field, value and reason."""
    return ValidationError(f"{path}: {name}={shown(value)}: {why}", parameter="lora_request")


def _rank(path: Path, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise wrong(path, name, value, "it must be an integer of at least 1")
    return value


def _number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise wrong(path, name, value, "it must be a number")
    return float(value)


def _flag(path: Path, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(path, name, value, "it must be true or false")
    return value


def _patterns(path: Path, name: str, given: Any, read: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise wrong(path, name, given, "it must be an object")
    for pattern in given:
        try:
            re.compile(pattern)
        except re.error as error:
            raise wrong(path, name, pattern, f"it is no regular expression: {error}") from None
    return {pattern: read(path, f"{name}[{pattern!r}]", value) for pattern, value in given.items()}


def _matching(patterns: Mapping[str, Any], layer: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a name, from a dot on."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return default
