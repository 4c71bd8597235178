"""Reads the rotary embedding out of a config.json, in the notation of transformers 5 or 4."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
)
from jaxllm.models.hf_config import MAX_POSITIONS, HFConfig

# The range of parameters. float32 holds the results of the formulas.
_LOWEST, _HIGHEST = 1e-6, 1e18
_LOWEST_OF = {"rope_theta": 1.001, "original_max_position_embeddings": 2}  # logarithms are taken

_PLACES = ("rope_parameters", "rope_scaling")
_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
# Other parameters are refused, because they may change the formula.
_KNOWN = {
    "rope_type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "truncate", "low_freq_factor", "high_freq_factor", "finetuned",
    "short_factor", "long_factor",
}  # fmt: skip


def read_rope(
    config: HFConfig,
    *,
    head_size: int,
    may_be_partial: bool = False,
    layer_type: str | None = None,
    is_scaled: bool = True,
    theta_field: str = "rope_theta",
    default_theta: float = 10_000.0,
    default_share: float = 1.0,
    other_types: Mapping[str, str] = MappingProxyType({}),
    other_parameters: Collection[str] = (),
    default_type: str = "default",
) -> RopeConfig:
    """Read the rotary embedding of heads of this size.

    Args:
      may_be_partial: the family supports rotating only a part of each head.
      layer_type: the type of the layer, for families whose parameters differ between types.
      is_scaled: whether rope_scaling, in the notation of transformers 4, is for these layers.
      theta_field: the field with the base in that notation.
      default_theta: the base if the config has none, as the family's class has it.
      default_share: likewise, the share of each head that is rotated.
      other_types: what types of the family's files mean: their name -> ours.
      other_parameters: what the family knows beside those of most families.
      default_type: likewise, the kind of the rotation.
    """
    places = _PLACES if is_scaled else _PLACES[:1]
    parameters = _parameters(config, places, layer_type, theta_field)
    parameters.setdefault("partial_rotary_factor", default_share)
    kind = parameters.get("rope_type") or default_type
    kind = other_types.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in _TYPES:
        raise UnsupportedModelError(
            f"rope type {shown(kind)} is not supported; supported are {', '.join(_TYPES)}"
        )
    unknown = sorted(parameters.keys() - _KNOWN - set(other_parameters))
    if unknown:
        raise UnsupportedModelError(f"rope parameter {', '.join(unknown):.80} is not supported")
    # A proportional rotation counts its pairs in the whole head.
    of_size = {} if kind == "proportional" else parameters
    size = _rotated_size(of_size, head_size, may_be_partial)
    max_len = config.integer("max_position_embeddings")
    theta = _number(parameters, "rope_theta", default_theta)
    original = _number(
        # Some configs have it outside of the parameters; that value takes precedence.
        {**parameters, **_given(config, "original_max_position_embeddings")},
        "original_max_position_embeddings",
        max_len,
    )
    scaling = None
    match kind:
        case "linear":
            scaling = LinearScaling(factor=_number(parameters, "factor"))
        case "dynamic":
            if size == 2:
                raise UnsupportedModelError("rope type 'dynamic' needs a head_dim above 2")
            factor, alpha = _number(parameters, "factor"), parameters.get("alpha")
            if alpha:  # stretches the base for all lengths alike
                stretch = _number(parameters, "alpha") ** (size / (size - 2))
                theta = _number({"rope_theta": theta * stretch}, "rope_theta")
            else:
                scaling = DynamicScaling(factor=factor, original_max_len=max_len)
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
            factor = _number(parameters, "factor", max_len / original)
            scaling = YarnScaling(
                factor=factor,
                original_max_len=int(original),
                beta_fast=_number(parameters, "beta_fast", 32.0),
                beta_slow=_number(parameters, "beta_slow", 1.0),
                truncate=parameters.get("truncate") is not False,
                attention_factor=_yarn_attention_factor(parameters, factor),
            )
        case "longrope":
            lists = [
                _factors(parameters, name, size // 2) for name in ("short_factor", "long_factor")
            ]
            is_long = (config.max_model_len or max_len) > original
            scaling = LongRopeScaling(
                factors=lists[is_long],
                attention_factor=_long_attention_factor(parameters, max_len, original),
            )
        case "proportional":
            scaling = ProportionalScaling(
                num_pairs=_num_rotated_pairs(parameters, head_size),
                factor=_number(parameters, "factor", 1.0),
            )
    rope = RopeConfig(size=size, theta=theta, scaling=scaling)
    longest = stretched_length(rope, max_len)
    if not 1 <= longest <= MAX_POSITIONS:
        raise CheckpointError(
            f"config.json: its rope parameters make sequences of {longest} tokens; 1 to "
            f"{MAX_POSITIONS} are supported"
        )
    return rope


def rope_number(config: HFConfig, name: str) -> float | None:
    """One of the parameters, as a number; None if it is missing or zero."""
    parameters = _parameters(config, _PLACES, None, "rope_theta")
    return _number(parameters, name) if parameters.get(name) else None


def with_axes(
    config: HFConfig,
    rope: RopeConfig,
    *,
    takes_turns: bool = False,
    default_shares: tuple[int, int, int] | None = None,
) -> RopeConfig:
    """The rotation for tokens with positions on three axes ("mrope"): each turns its share of the
    pairs. The shares lie one behind the other, or the pairs take turns while a share lasts.

    Args:
      takes_turns: the pairs of the family always take turns, and its class does not ask the config.
      default_shares: those of the family's class.
    """
    parameters = _parameters(config, _PLACES, None, "rope_theta")
    shares: Any = parameters.get("mrope_section", default_shares)
    is_list = isinstance(shares, list | tuple) and len(shares) == 3
    numbers = [share for share in shares if type(share) is int and share > 0] if is_list else []
    if len(numbers) != 3 or sum(numbers) != rope.size // 2:
        raise CheckpointError(
            f"config.json: rope parameter mrope_section={shown(shares)} must be three numbers "
            f"above zero, {rope.size // 2} together"
        )
    if isinstance(rope.scaling, DynamicScaling):
        raise UnsupportedModelError("rope type 'dynamic' is not supported with mrope_section")
    axes = [axis for axis, share in enumerate(numbers) for _ in range(share)]
    asked = parameters.get("mrope_interleaved")
    if not isinstance(asked, bool | None):
        raise CheckpointError(
            f"config.json: rope parameter mrope_interleaved={shown(asked)} must be true or false"
        )
    if takes_turns and asked is False:
        raise UnsupportedModelError(
            "config.json: rope parameter mrope_interleaved=False is not supported in this family"
        )
    if takes_turns or asked:
        taken = [range(axis, 3 * share, 3) for axis, share in enumerate(numbers)]
        axes = [
            next((axis for axis in (1, 2) if pair in taken[axis]), 0) for pair in range(len(axes))
        ]
    return replace(rope, axes=tuple(axes))


def stretched_length(rope: RopeConfig, max_position_embeddings: int) -> int:
    """The longest sequence that a rotary embedding supports."""
    match rope.scaling:
        case LinearScaling(factor=factor) | DynamicScaling(factor=factor):
            return int(max_position_embeddings * factor)
        case YarnScaling(factor=factor, original_max_len=original):
            return max(max_position_embeddings, int(original * factor))
        case _:
            return max_position_embeddings


def _rotated_size(parameters: Mapping[str, Any], head_size: int, may_be_partial: bool) -> int:
    share = parameters.get("partial_rotary_factor")
    share = 1.0 if share is None else _number(parameters, "partial_rotary_factor")
    size = int(head_size * share)
    if may_be_partial and share <= 1 and size > 0 and size % 2 == 0:
        return size
    if share == 1 and head_size % 2 == 0:
        return head_size
    raise UnsupportedModelError(
        f"rotating a part of the head is not supported: head_dim={head_size}, "
        f"partial_rotary_factor={shown(parameters.get('partial_rotary_factor'))}; the whole of an "
        "even head_dim must be rotated"
    )


def _num_rotated_pairs(parameters: Mapping[str, Any], head_size: int) -> int:
    """The pairs that a proportional rotation rotates."""
    share = _number(parameters, "partial_rotary_factor", 1.0)
    if share > 1:
        raise CheckpointError(
            f"config.json: rope parameter partial_rotary_factor={share} must be at most 1"
        )
    return int(share * head_size // 2)


def _parameters(
    config: HFConfig, places: Sequence[str], layer_type: str | None, theta_field: str
) -> dict[str, Any]:
    """Collect the parameters of a type of layers from all places.

    transformers 5 writes `rope_parameters`. Transformers 4 writes `rope_scaling` and, beside it,
    `rope_theta`. If both exist, `rope_scaling` takes precedence, as in transformers: users set it
    by overrides.
    """
    parameters: dict[str, Any] = {}
    # What a class has by default, it has in the notation of transformers 5.
    is_older = config.fields.get("rope_parameters") is None and config.get("rope_scaling")
    for name in places[1:] if is_older else places:
        given = config.get(name)
        if not isinstance(given, Mapping | None):
            raise CheckpointError(f"config.json: {name}={shown(given)} must be an object")
        if layer_type is not None and given and _is_per_layer_type(given):
            given = given.get(layer_type)
        parameters |= _with_rope_type(name, given or {})
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedModelError(
            f"rope_parameters per layer type ({', '.join(parameters)}) are not supported"
        )
    fields = {"rope_theta": theta_field, "partial_rotary_factor": "partial_rotary_factor"}
    for name, its_field in fields.items():
        outside = config.get(its_field)
        if outside is None:
            continue
        inside = parameters.setdefault(name, outside)
        if inside is not outside and inside != outside:  # NaN is not even itself
            raise CheckpointError(
                f"config.json: {its_field}={shown(outside)} contradicts rope_parameters, where it "
                f"is {shown(inside)}; change both, or only the one in rope_parameters"
            )
    return parameters


def _is_per_layer_type(parameters: Mapping[str, Any]) -> bool:
    return all(isinstance(value, Mapping | None) for value in parameters.values())


def _with_rope_type(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Rename `type`, as older configs call it, to `rope_type`."""
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


def _long_attention_factor(parameters: Mapping[str, Any], max_len: int, original: float) -> float:
    if parameters.get("attention_factor") is not None:
        return _number(parameters, "attention_factor")
    factor = _number(parameters, "factor", max_len / original)
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _factors(parameters: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    """A factor for each of so many angles."""
    given = parameters.get(name)
    if not isinstance(given, list | tuple) or len(given) != count:
        raise CheckpointError(
            f"config.json: rope parameter {name}={shown(given)} must be a list of {count} numbers, "
            "one for each pair that is rotated"
        )
    return tuple(_number({name: value}, name) for value in given)


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


def _given(config: HFConfig, name: str) -> dict[str, Any]:
    value = config.get(name)
    return {} if value is None else {name: value}
