"""Reads the rotary embedding out of a config.json, in the notation of transformers 5 or 4."""

import math
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
)

# The longest sequence: positions are 32-bit integers, with room to count beyond them.
MAX_POSITIONS = 1 << 30
# What parameters are between; float32 holds what is computed of them.
_LOWEST, _HIGHEST = 1e-6, 1e18
_LOWEST_OF = {"rope_theta": 1.001, "original_max_position_embeddings": 1}  # logarithms are taken

_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
# Besides what a type needs; a parameter that is not listed may change the formula.
_KNOWN = {
    "rope_type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "truncate", "low_freq_factor", "high_freq_factor", "finetuned",
}  # fmt: skip


def read_rope(
    config: Mapping[str, Any], *, head_size: int, max_position_embeddings: int
) -> tuple[RopeConfig, int]:
    """The rotary embedding, and the longest sequence that it is made for."""
    parameters = _parameters(config)
    kind = parameters.get("rope_type") or "default"
    if kind not in _TYPES:
        raise UnsupportedModelError(
            f"rope type {shown(kind)} is not supported; supported are {', '.join(_TYPES)}"
        )
    unknown = sorted(set(parameters) - _KNOWN)
    if unknown:
        raise UnsupportedModelError(f"rope parameter {', '.join(unknown):.80} is not supported")
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0) or head_size % 2:
        raise UnsupportedModelError(
            f"rotating a part of the head is not supported: head_dim={head_size}, "
            f"partial_rotary_factor={shown(parameters.get('partial_rotary_factor'))}; the whole "
            "of an even head_dim must be rotated"
        )
    theta = _number(parameters, "rope_theta", 10_000.0)
    original = _number(
        # Some configs have it outside, and then that one counts.
        {**parameters, **_given(config, "original_max_position_embeddings")},
        "original_max_position_embeddings",
        max_position_embeddings,
    )
    max_len, scaling = max_position_embeddings, None
    match kind:
        case "linear":
            scaling = LinearScaling(factor=_number(parameters, "factor"))
            max_len = int(max_position_embeddings * scaling.factor)
        case "dynamic":
            if head_size == 2:
                raise UnsupportedModelError("rope type 'dynamic' needs a head_dim above 2")
            scaling = DynamicScaling(
                factor=_number(parameters, "factor"), original_max_len=max_position_embeddings
            )
            max_len = int(max_position_embeddings * scaling.factor)
        case "llama3":
            scaling = Llama3Scaling(
                factor=_number(parameters, "factor"),
                low_freq_factor=_number(parameters, "low_freq_factor"),
                high_freq_factor=_number(parameters, "high_freq_factor"),
                original_max_len=int(original),
            )
            if scaling.high_freq_factor <= scaling.low_freq_factor:
                raise CheckpointError(
                    f"config.json: rope parameter high_freq_factor={scaling.high_freq_factor} must "
                    f"be above low_freq_factor={scaling.low_freq_factor}"
                )
        case "yarn":
            factor = _number(parameters, "factor", max_position_embeddings / original)
            scaling = YarnScaling(
                factor=factor,
                original_max_len=int(original),
                beta_fast=_number(parameters, "beta_fast", 32.0),
                beta_slow=_number(parameters, "beta_slow", 1.0),
                truncate=parameters.get("truncate") is not False,
                attention_factor=_yarn_attention_factor(parameters, factor),
            )
            max_len = max(max_position_embeddings, int(original * factor))
    if not 1 <= max_len <= MAX_POSITIONS:
        raise CheckpointError(
            f"config.json: its rope parameters make sequences of {max_len} tokens; 1 to "
            f"{MAX_POSITIONS} are supported"
        )
    return RopeConfig(head_size=head_size, theta=theta, scaling=scaling), max_len


def _parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`; before, there were `rope_scaling` and, beside it,
    `rope_theta`. With both, rope_scaling counts, as in transformers; it is what overrides set."""
    parameters: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        given = config.get(name)
        if not isinstance(given, Mapping | None):
            raise CheckpointError(f"config.json: {name}={shown(given)} must be an object")
        parameters |= _with_rope_type(name, given or {})
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedModelError(
            f"rope_parameters per layer type ({', '.join(parameters)}) are not supported"
        )
    for name in ("rope_theta", "partial_rotary_factor"):
        outside = config.get(name)
        if outside is None:
            continue
        inside = parameters.setdefault(name, outside)
        if inside is not outside and inside != outside:  # NaN is not even itself
            raise CheckpointError(
                f"config.json: {name}={shown(outside)} contradicts rope_parameters, where it is "
                f"{shown(inside)}; change both, or only the one in rope_parameters"
            )
    return parameters


def _with_rope_type(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters whose kind is called `rope_type`; older configs call it `type`."""
    parameters = dict(given)
    older = parameters.pop("type", None)
    if older is None:
        return parameters
    kind = parameters.get("rope_type") or older
    if kind != older:
        raise CheckpointError(
            f"config.json: {name} has type={shown(older)}, which contradicts "
            f"rope_type={shown(kind)}; "
            "set rope_type"
        )
    return parameters | {"rope_type": kind}


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return _number(parameters, "attention_factor")

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        mscale, of_all = _number(parameters, "mscale"), _number(parameters, "mscale_all_dim")
        return magnitude(mscale) / magnitude(of_all)
    return magnitude(1.0)


def _number(parameters: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = parameters.get(name)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json: rope parameter {name} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(
            f"config.json: rope parameter {name}={shown(value)} must be above zero"
        )
    lowest = _LOWEST_OF.get(name, _LOWEST)
    if not lowest <= value <= _HIGHEST:
        raise CheckpointError(
            f"config.json: rope parameter {name}={shown(value)} must be at least {lowest} and at "
            f"most {_HIGHEST}"
        )
    return float(value)


def _given(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {} if config.get(name) is None else {name: config[name]}
