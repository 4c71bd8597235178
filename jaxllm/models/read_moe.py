"""Reads the mixture of experts of a config.json."""

from collections.abc import Sequence
from typing import Any

from jaxllm_kernels.experts.api import GELU_TANH, ExpertsConfig

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.layers.moe import MoESpec
from jaxllm.layers.router import RouterSpec
from jaxllm.models.hf_config import HFConfig, check_size

_MOST_EXPERTS = 1 << 14
_MOST_WEIGHTS = 3 << 36  # of a layer

# What experts with and without gates compute, under the names of config.json.
_GATED: dict[str, ExpertsConfig] = {
    "silu": ExpertsConfig(),
    "swish": ExpertsConfig(),
    "gelu_pytorch_tanh": GELU_TANH,
    "gelu_new": GELU_TANH,
    "gelu_fast": GELU_TANH,
}
_UNGATED = {"relu2": ExpertsConfig(is_gated=False)}

# Fields of families with experts that act in training only.
TRAINING = {
    field: "acts in training only: a loss that spreads tokens over experts, and its noise"
    for field in (
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "router_z_loss_coef",
        "aux_loss_alpha",
        "seq_aux",
    )
}


def read_moe(
    config: HFConfig,
    router: RouterSpec,
    *,
    count: str = "num_experts",
    default_count: int | None = None,
    choices: str = "num_experts_per_tok",
    default_choices: int | None = None,
    size: str = "moe_intermediate_size",
    default_size: int | None = None,
    activation: str = "hidden_act",
    is_gated: bool = True,
    kind: type[MoESpec] = MoESpec,
    **others: Any,
) -> MoESpec:
    """Read a mixture of experts. `count`, `choices` and `size` are the fields that say how many
    experts there are, how many a token chooses, and how large they are, `activation` the one that
    names the function; `others` are fields of the spec."""
    supported = _GATED if is_gated else _UNGATED
    function = config.get(activation) or next(iter(supported))
    if function not in supported:
        raise UnsupportedModelError(
            f"{activation} {shown(function)} is not supported for experts; supported: "
            f"{', '.join(supported)}"
        )
    spec = kind(
        num_experts=config.integer(count, default_count),
        num_choices=config.integer(choices, default_choices),
        intermediate_size=config.integer(size, default_size),
        router=router,
        activation=supported[function],
        **others,
    )
    check_size(count, spec.num_experts, _MOST_EXPERTS)
    check_size(
        f"{count} times {size} times hidden_size, for all matrices,",
        spec.num_weights(config.integer("hidden_size")),
        _MOST_WEIGHTS,
    )
    if spec.num_choices > spec.num_experts:
        raise CheckpointError(
            f"config.json: {choices}={spec.num_choices} is above {count}={spec.num_experts}"
        )
    _check_groups(spec)
    return spec


def _check_groups(spec: MoESpec) -> None:
    router, count = spec.router, spec.num_experts
    if count % router.num_groups:
        raise CheckpointError(
            f"config.json: n_group={router.num_groups} does not divide the {count} experts"
        )
    in_chosen = router.chosen_groups * (count // router.num_groups)
    if router.chosen_groups > router.num_groups or in_chosen < spec.num_choices:
        raise CheckpointError(
            f"config.json: topk_group={router.chosen_groups} of n_group={router.num_groups} groups "
            f"do not have the {spec.num_choices} experts of a token"
        )


def read_numbers(config: HFConfig, name: str) -> list[int]:
    """A list of layers' numbers; empty if the field is missing."""
    value = config.get(name)
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else None
    if value is not None and (items is None or not all(type(item) is int for item in items)):
        raise CheckpointError(f"config.json: {name}={shown(value)} must be a list of layers")
    return list(items or ())


def read_same_number(config: HFConfig, name: str, num_layers: int, default: int) -> int:
    """A number of all layers, which may be listed for each of them."""
    value = config.get(name)
    if not isinstance(value, list):
        return config.integer(name, default)
    numbers = read_numbers(config, name)
    if len(numbers) != num_layers or len(set(numbers)) != 1:
        raise UnsupportedModelError(
            f"config.json: {name}={shown(value)} is not supported; supported is one number for all "
            "layers"
        )
    return numbers[0]
