"""The stages of a pipeline: which layers each has, on which devices, with which caches.

Without pipeline parallelism there is one stage, which is the whole model. With it, a step passes
through the stages one after the other, and each has another step to run while this one is away.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh
from jaxllm_kernels.platform import Device

from jaxllm.config import ParallelConfig
from jaxllm.errors import ValidationError, refused
from jaxllm.models.part import ModelPart
from jaxllm.parallel.sharding import make_mesh
from jaxllm.plural import counted


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A part of the model on devices of its own."""

    index: int
    part: ModelPart
    mesh: Mesh
    cache_shapes: tuple[jax.ShapeDtypeStruct, ...]  # of its layers
    weights_bytes: int  # of one device

    @property
    def kv_cache_bytes(self) -> int:
        """Of one device."""
        num_bytes = sum(shape.size * shape.dtype.itemsize for shape in self.cache_shapes)
        return num_bytes // self.mesh.size


def stage_meshes(devices: Sequence[Device], parallel: ParallelConfig) -> list[Mesh]:
    """A mesh for each stage: neighbours, in the order of the devices."""
    size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    is_there = "there is" if len(devices) == 1 else "there are"
    what = f"{is_there} {counted(len(devices), 'device')} ({devices[0].device_kind})"
    if size > len(devices):
        raise ValidationError(
            f"tensor_parallel_size={size}, but {what}; lower it",
            parameter="tensor_parallel_size",
            value=size,
        )
    if size * num_stages > len(devices):
        raise refused(
            "pipeline_parallel_size",
            num_stages,
            f"{num_stages} stages with tensor_parallel_size={size} want {size * num_stages} "
            f"devices, and {what}; lower one of them",
        )
    return [make_mesh(devices[size * stage : size * (stage + 1)]) for stage in range(num_stages)]


def check_num_stages(num_stages: int, num_layers: int) -> None:
    """A stage has one layer at least."""
    if num_stages > num_layers:
        raise refused(
            "pipeline_parallel_size",
            num_stages,
            f"the model has num_hidden_layers={num_layers}, and every stage needs one; lower it",
        )


def activation_bytes(
    stage: StagePlan, num_stages: int, *, num_tokens: int, hidden_size: int, itemsize: int
) -> int:
    """What hidden states of the largest steps take on each device of a stage, when each step under
    way has those that come in and those that go out."""
    num_sides = (not stage.part.embeds) + (not stage.part.has_head)
    return num_sides * (num_stages + 1) * num_tokens * hidden_size * itemsize
