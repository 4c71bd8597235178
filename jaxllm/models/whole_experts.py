"""Expert parallelism: every device has some of the experts, in place of a part of each."""

import dataclasses

from jaxllm.errors import refused
from jaxllm.layers.moe import MoESpec
from jaxllm.models.specs import Architecture, FFNSpec


def with_whole_experts(architecture: Architecture) -> Architecture:
    """The architecture with experts that are not cut. Refuses a model without experts."""
    layers = tuple(
        dataclasses.replace(layer, ffns=tuple(map(_whole, layer.ffns)))
        for layer in architecture.layers
    )
    if layers == architecture.layers:
        raise refused("enable_expert_parallel", True, f"{architecture.name} has no experts")
    return dataclasses.replace(architecture, layers=layers)


def _whole(ffn: FFNSpec) -> FFNSpec:
    return dataclasses.replace(ffn, has_whole_experts=True) if isinstance(ffn, MoESpec) else ffn
