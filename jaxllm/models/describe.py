"""The layers of an architecture as text for people, one line for each distinct layer."""

import dataclasses
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from jaxllm.models.specs import Architecture, LayerSpec


def describe_layers(architecture: Architecture) -> list[str]:
    """The distinct layers, in the order of their first use, each with its indices."""
    return [
        f"{_ranges(architecture, layer)}: {_layer(layer)}"
        for layer in dict.fromkeys(architecture.layers)
    ]


def _layer(layer: LayerSpec) -> str:
    parts = [f"{part.name} ({_fields(part)})" for part in (*layer.mixers, *layer.ffns)]
    scale = "" if layer.residual_scale == 1.0 else f", residual_scale {layer.residual_scale:g}"
    block = getattr(layer.block, "__name__", str(layer.block))
    return f"{block}, {_value(layer.norm)}, {', '.join(parts)}{scale}"


def _ranges(architecture: Architecture, layer: LayerSpec) -> str:
    """The indices of a layer's uses: "0-4, 6-10"."""
    indices = [index for index, its in enumerate(architecture.layers) if its == layer]
    runs = []
    for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        first, *_, last = [*(index for _, index in run)] * 2
        runs.append(f"{first}" if first == last else f"{first}-{last}")
    return ", ".join(runs)


def _fields(spec: Any) -> str:
    """The fields of a spec that are not its defaults."""
    return ", ".join(f"{name} {_value(value)}" for name, value in _own(spec))


def _own(spec: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if value != field.default:
            yield field.name, value


def _value(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        name = type(value).__name__.removesuffix("Spec").removesuffix("Config")
        return f"{name}({_fields(value)})"
    return f"{value:g}" if isinstance(value, float) else str(value)
