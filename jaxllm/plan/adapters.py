"""What adapters an engine has room for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxllm_kernels.low_rank.api import LowRankOp

from jaxllm.config import EngineConfig
from jaxllm.errors import UnsupportedModelError
from jaxllm.lora.device import AdapterArrays, adaptable_layers, adapters_bytes
from jaxllm.lora.request import AdapterLimits
from jaxllm.models.base import Model


@dataclass(frozen=True, kw_only=True)
class AdapterPlan:
    """The slots of adapters on the devices, and the layers that adapters may change."""

    max_loras: int
    max_lora_rank: int
    # Name in a checkpoint, inputs, outputs.
    layers: tuple[tuple[str, int, int], ...]
    bytes_by_stage: tuple[int, ...]  # on one device
    op: LowRankOp

    def arrays(self, model: Model, dtype: Any, mesh: Mesh) -> AdapterArrays:
        """The arrays for an abstract part of the model."""
        return AdapterArrays.of(
            model, num_slots=self.max_loras, rank=self.max_lora_rank, dtype=dtype, mesh=mesh
        )

    def limits(self, dtype: Any) -> AdapterLimits:
        return AdapterLimits(
            max_loras=self.max_loras,
            max_lora_rank=self.max_lora_rank,
            dtype=jnp.dtype(dtype).name,
            layers={name: (inputs, outputs) for name, inputs, outputs in self.layers},
        )


def plan_adapters(
    config: EngineConfig,
    in_parts: Sequence[Model],
    meshes: Sequence[Mesh],
    dtype: Any,
    *,
    op: LowRankOp,
) -> AdapterPlan | None:
    """Plan the slots for the parts of a model. None: no adapters are asked for."""
    lora = config.lora
    if not lora.enable_lora:
        return None
    layers = {name: sizes for part in in_parts for name, sizes in adaptable_layers(part).items()}
    if not layers:
        raise UnsupportedModelError("enable_lora: the model has no layer that adapters can change")
    plan = AdapterPlan(
        max_loras=lora.max_loras,
        max_lora_rank=lora.max_lora_rank,
        layers=tuple((name, *sizes) for name, sizes in layers.items()),
        bytes_by_stage=(),
        op=op,
    )
    sizes = (
        adapters_bytes(plan.arrays(part, dtype, mesh).abstract())
        for part, mesh in zip(in_parts, meshes, strict=True)
    )
    return replace(plan, bytes_by_stage=tuple(sizes))
