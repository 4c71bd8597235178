"""Reads recurrent mixers of a config.json, and says where their parameters are in checkpoints."""

from collections.abc import Collection, Sequence

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.layers.gated_delta import GatedDeltaSpec
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.models.checkpoint_map import Concat, Place, Rows, Rule, Source, Tensor, ViewedAs
from jaxllm.models.family import FULL
from jaxllm.models.hf_config import HFConfig, check_size

LINEAR = "linear_attention"

_MOST_STATE = 1 << 24  # elements of a layer's state of one request
_MOST_TAPS = 64


def read_kinds(
    config: HFConfig, *, recurrent: Collection[str] = (LINEAR,), interval: int = 4
) -> list[bool]:
    """Whether each layer is recurrent. Every `interval`-th layer has attention, unless the config
    says otherwise; `recurrent` are the names of other layers."""
    num_layers = config.integer("num_hidden_layers")
    interval = config.integer("full_attention_interval", interval)
    kinds = config.layer_types(num_layers, supported=(FULL, *recurrent))
    if kinds is None:
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    return [kind != FULL for kind in kinds]


def read_gated_delta(config: HFConfig) -> GatedDeltaSpec:
    """Read a gated delta net, from the field names of Qwen."""
    function = config.get("hidden_act") or "silu"
    if function not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"hidden_act {shown(function)} is not supported for convolutions; supported is 'silu'"
        )
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
        _MOST_STATE,
    )
    return spec


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


def from_groups(module: str, num_groups: int) -> Rule:
    """A rule for one tensor of several parts, whose groups of rows follow each other: each key head
    with its rows of every part."""

    def rule(place: Place) -> Source:
        rows = [piece[0] // num_groups for piece in place.pieces]
        whole = (sum(rows) * num_groups, *place.pieces[0][1:])
        return _grouped(place.plain_tensor(module, whole), rows, num_groups)

    return rule


def _grouped(tensor: Tensor, rows: Sequence[int], num_groups: int) -> Source:
    """The parts of a tensor one after the other; of each part, all groups."""
    pieces, first = [], 0
    for count in rows:
        starts = [first + group * sum(rows) for group in range(num_groups)]
        pieces += [Rows(tensor, start, start + count) for start in starts]
        first += count
    return Concat(tuple(pieces))
