"""Reads recurrent mixers of a config.json, and says where their parameters are in checkpoints."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.layers.gated_delta import GatedDeltaSpec
from jaxllm.layers.mamba import GatedNormSpec, MambaSpec
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.models.checkpoint_map import Concat, Place, Rule, Source, ViewedAs, as_named
from jaxllm.models.family import FULL
from jaxllm.models.hf_config import HFConfig, check_size
from jaxllm.models.read_moe import read_numbers
from jaxllm.models.spans import in_spans

LINEAR = "linear_attention"
# Names of attention and of Mamba2 in older configs.
ATTENTION, MAMBA = "attention", "mamba"

MOST_STATE = 1 << 24  # elements of a layer's state of one request
_MOST_TAPS = 64

# Fields of Mamba2 mixers that no reader needs.
MAMBA_HARMLESS = {
    **dict.fromkeys(
        ("mamba_chunk_size", "chunk_size", "use_mamba_kernels"),
        "how transformers computes, not what",
    ),
    **dict.fromkeys(
        (
            "time_step_min",
            "time_step_max",
            "time_step_floor",
            "time_step_rank",
            "time_step_scale",
            "time_step_init_scheme",
            "rescale_prenorm_residual",
        ),
        "acts in training only: how weights begin",
    ),
    "num_logits_to_keep": "selects what a call of transformers returns",
}


def read_kinds(config: HFConfig, recurrent: Collection[str] = (LINEAR, MAMBA)) -> list[bool] | None:
    """Whether each layer is recurrent, which the layers of these types are; None if the config does
    not list types."""
    num_layers = config.integer("num_hidden_layers")
    kinds = config.layer_types(num_layers, supported=(FULL, ATTENTION, *recurrent))
    return None if kinds is None else [kind in recurrent for kind in kinds]


def read_layer_numbers(config: HFConfig, name: str) -> list[int] | None:
    """The numbers of some layers, counted from zero; None if the field is missing."""
    if config.get(name) is None:
        return None
    numbers, num_layers = read_numbers(config, name), config.integer("num_hidden_layers")
    if not all(0 <= number < num_layers for number in numbers):
        raise CheckpointError(
            f"config.json: {name}={shown(numbers)} must be below num_hidden_layers={num_layers}"
        )
    return numbers


def read_gated_delta(config: HFConfig) -> GatedDeltaSpec:
    """Read a gated delta net, from the field names of Qwen."""
    check_activation(config, "hidden_act")
    num_key_heads = config.integer("linear_num_key_heads", 16)
    num_heads = config.integer("linear_num_value_heads", 32)
    if num_heads % num_key_heads:
        raise CheckpointError(
            f"config.json: linear_num_value_heads={num_heads} is not a multiple of "
            f"linear_num_key_heads={num_key_heads}"
        )
    spec = GatedDeltaSpec(
        num_key_heads=num_key_heads,
        num_heads=num_heads,
        key_size=config.integer("linear_key_head_dim", 128),
        value_size=config.integer("linear_value_head_dim", 128),
        conv_width=read_conv_width(config, "linear_conv_kernel_dim", 4),
        norm=RMSNormSpec(eps=config.positive("rms_norm_eps", 1e-6)),
    )
    check_size(
        "linear_num_value_heads times linear_key_head_dim times linear_value_head_dim",
        spec.num_heads * spec.key_size * spec.value_size,
        MOST_STATE,
    )
    return spec


def read_mamba(
    config: HFConfig,
    norm: GatedNormSpec | None,
    *,
    inner_size: int | None = None,
    activation: str = "hidden_act",
    **others: Any,
) -> MambaSpec:
    """Read a Mamba2 mixer, from the field names of Bamba.

    `inner_size` is the size of all heads; None: so many times that of hidden states as the config
    says. `activation` is the field that names the function behind the convolution, `others` are
    fields of the spec.
    """
    check_activation(config, activation)
    num_heads = config.integer("mamba_n_heads", 128)
    num_groups = config.integer("mamba_n_groups", 1)
    if inner_size is None:
        inner_size = config.integer("mamba_expand", 2) * config.integer("hidden_size")
    head_size = inner_size // num_heads
    if config.get("mamba_d_head") not in (None, "auto"):
        head_size = config.integer("mamba_d_head")
    if num_heads * head_size != inner_size:
        raise CheckpointError(
            f"config.json: {num_heads} heads of {head_size} in Mamba2 mixers are not their inner "
            f"size, {inner_size}"
        )
    if num_heads % num_groups:
        raise CheckpointError(
            f"config.json: {num_heads} heads of Mamba2 mixers are not a multiple of their "
            f"{num_groups} groups"
        )
    has_bias = config.flag("mamba_proj_bias")
    spec = MambaSpec(
        **{
            "num_heads": num_heads,
            "num_groups": num_groups,
            "head_size": head_size,
            "state_size": config.integer("mamba_d_state", 256),
            "conv_width": read_conv_width(config, "mamba_d_conv", 4),
            "conv_bias": config.flag("mamba_conv_bias", True),
            "in_bias": has_bias,
            "out_bias": has_bias,
            "norm": norm,
            "step_limits": _read_step_limits(config),
        }
        | others
    )
    check_size(
        "the size of all heads of a Mamba2 mixer times its state size",
        spec.num_heads * spec.head_size * spec.state_size,
        MOST_STATE,
    )
    return spec


def _read_step_limits(config: HFConfig) -> tuple[float, float]:
    value = config.get("time_step_limit", (0.0, math.inf))
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    # transformers 5 writes an infinite number as an object.
    limits = [math.inf if item == {"__float__": "Infinity"} else item for item in items]
    match limits:
        case [int() | float() as shortest, int() | float() as longest]:
            if 0 <= shortest <= longest:
                return float(shortest), float(longest)
    raise CheckpointError(
        f"config.json: time_step_limit={shown(value)} must be the shortest and the longest step"
    )


def check_activation(config: HFConfig, name: str) -> None:
    function = config.get(name) or "silu"
    if function not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"{name} {shown(function)} is not supported for convolutions; supported is 'silu'"
        )


def read_conv_width(config: HFConfig, name: str, default: int) -> int:
    """The number of tokens that a convolution sees, which is at least two."""
    width = config.integer(name, default)
    if not 2 <= width <= _MOST_TAPS:
        raise UnsupportedModelError(
            f"config.json: {name}={width} is not supported; supported are 2 to {_MOST_TAPS}"
        )
    return width


def taps(place: Place) -> Source:
    """The taps of a convolution [C, W], which checkpoints have as [C, 1, W]; its bias as it is."""
    channels = sum(piece[0] for piece in place.pieces)
    if place.leaf == "bias":
        return place.plain_tensor(place.module, (channels,))
    (width,) = place.pieces[0][1:]
    return ViewedAs(place.plain_tensor(place.module, (channels, 1, width)), (channels, width))


def taps_apart(place: Place) -> Source:
    """The taps of queries, keys and values, which are tensors [C, 1, W] of their own."""
    names = ("q_conv1d", "k_conv1d", "v_conv1d")
    return Concat(
        tuple(
            ViewedAs(place.plain_tensor(name, (channels, 1, width)), (channels, width))
            for name, (channels, width) in zip(names, place.pieces, strict=True)
        )
    )


def final_norm_at(name: str) -> Rule:
    """A rule for modules `norm`, of which the decoder's has this name in checkpoints. Those in
    mixers are named alike."""

    def rule(place: Place) -> Source:
        is_final = "." not in place.parent
        return as_named(place._replace(module=name) if is_final else place)

    return rule


def from_groups(module: str, num_groups: int) -> Rule:
    """A rule for one tensor of several parts, whose groups of rows follow each other: each key head
    with its rows of every part."""

    def rule(place: Place) -> Source:
        rows = [piece[0] // num_groups for piece in place.pieces]
        whole = (sum(rows) * num_groups, *place.pieces[0][1:])
        starts = [sum(rows[:part]) for part in range(len(rows))]
        return in_spans(
            place.tensor(module, whole),
            (
                (group * sum(rows) + start, group * sum(rows) + start + count)
                for start, count in zip(starts, rows, strict=True)
                for group in range(num_groups)
            ),
        )

    return rule
