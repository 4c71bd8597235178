"""The stages of a pipeline: the layers, devices and caches of each.

Without pipeline parallelism there is one stage, which is the whole model. With it, a step passes
through the stages one after the other, while the other stages run other steps.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxllm_kernels.platform import Device

from jaxllm.cache_groups import CacheGroup, window_of
from jaxllm.config import ParallelConfig
from jaxllm.errors import ValidationError, refused
from jaxllm.layers.attention import cache_axes
from jaxllm.layers.context import MixerBackend, MixerConfig
from jaxllm.layers.moe import MoESpec
from jaxllm.models.part import ModelPart
from jaxllm.models.specs import Architecture
from jaxllm.parallel.sharding import device_bytes, make_mesh, num_pieces, sharding
from jaxllm.plan.between_steps import BetweenSteps
from jaxllm.plan.count_weights import WeightCounts
from jaxllm.plan.draft_plan import DraftPlan
from jaxllm.plural import counted


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A part of the model on devices of its own."""

    index: int
    part: ModelPart
    mesh: Mesh
    cache_shapes: tuple[jax.ShapeDtypeStruct, ...]  # by attention, over all devices
    # Of mixers that keep no tokens: the arrays of their states for all slots, over all devices.
    state_shapes: tuple[tuple[jax.ShapeDtypeStruct, ...], ...]
    snapshot_shapes: tuple[tuple[jax.ShapeDtypeStruct, ...], ...]  # copies of such states
    attention_configs: tuple[MixerConfig, ...]  # of one device
    block_bytes: tuple[int, ...]  # of a block on one device, by attention
    weights: WeightCounts  # on one device, without those that draft
    between: BetweenSteps  # what is there between steps beside these
    draft: DraftPlan | None = None

    @property
    def weights_bytes(self) -> int:
        """The bytes of weights on one device, with those that draft."""
        return self.weights.num_bytes + (0 if self.draft is None else self.draft.weights_bytes)

    @property
    def kv_cache_bytes(self) -> int:
        """The bytes of the caches on one device, with those of what drafts."""
        of_draft = 0 if self.draft is None else self.draft.kv_cache_bytes
        return of_draft + sum(map(device_bytes, self.cache_shapes))

    @property
    def states_bytes(self) -> int:
        """The bytes of the states of all slots on one device."""
        return sum(map(device_bytes, jax.tree.leaves(self.state_shapes)))

    @property
    def snapshots_bytes(self) -> int:
        """The bytes of the snapshots of states on one device."""
        return sum(map(device_bytes, jax.tree.leaves(self.snapshot_shapes)))

    def cache_bytes(self, groups: Sequence[CacheGroup]) -> int:
        """The bytes on one device if the groups had these sizes."""
        num_blocks = {group.window: group.num_blocks for group in groups}
        of_draft = 0 if self.draft is None else self.draft.cache_bytes(num_blocks)
        return of_draft + sum(
            num_blocks[window_of(config)] * size
            for config, size in zip(self.attention_configs, self.block_bytes, strict=True)
        )


def replica_devices(parallel: ParallelConfig, replica: int) -> Sequence[Device]:
    """The devices that a replica of the engine may use: neighbours in JAX's order."""
    devices = jax.devices()
    size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    replicas = parallel.data_parallel_size
    if replicas > 1 and size * replicas > len(devices):
        raise refused(
            "data_parallel_size",
            replicas,
            f"{replicas} replicas with tensor_parallel_size={parallel.tensor_parallel_size} and "
            f"pipeline_parallel_size={parallel.pipeline_parallel_size} want {size * replicas} "
            f"devices, and there are {len(devices)}; lower one of them",
        )
    return devices[replica * size : (replica + 1) * size] if replicas > 1 else devices


def stage_meshes(devices: Sequence[Device], parallel: ParallelConfig) -> list[Mesh]:
    """Make a mesh for each stage, of neighbours in the order of the devices."""
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
    """Refuse more stages than layers."""
    if num_stages > num_layers:
        raise refused(
            "pipeline_parallel_size",
            num_stages,
            f"the model has num_hidden_layers={num_layers}, and every stage needs one; lower it",
        )


def check_parts(parts: Sequence[ModelPart], architecture: Architecture) -> None:
    """Refuse stages that need what only an earlier one has."""
    if len(parts) > 1 and architecture.per_layer_input is not None:
        raise refused(
            "pipeline_parallel_size",
            len(parts),
            "each layer of the model has an input of its own for every token, and only the first "
            "stage gets tokens; set it to 1",
        )
    for part in parts:
        for index in part.layers:
            owner = architecture.layers[index].caches_of
            if owner is not None and owner not in part.layers:
                raise refused(
                    "pipeline_parallel_size",
                    len(parts),
                    f"layer {index} of the model attends to the keys and values of layer {owner}, "
                    "which an earlier stage has; lower it",
                )


def expert_weights(architecture: Architecture, part: ModelPart) -> Counter[float]:
    """The number of weights of all experts of a part, by the share of them that a token chooses."""
    counts = Counter[float]()
    for index in part.layers:
        for ffn in architecture.layers[index].ffns:
            if isinstance(ffn, MoESpec):
                size = ffn.num_weights(architecture.hidden_size)
                counts[ffn.num_choices / ffn.num_experts] += size
    return counts


def cache_shape(
    attention: MixerBackend,
    config: MixerConfig,
    num_blocks: int,
    block_size: int,
    dtype: Any,
    mesh: Mesh,
) -> jax.ShapeDtypeStruct:
    """The shape of a layer's cache over all devices of a mesh. `config` is that of one device."""
    op: Any = attention  # for configs of this kind
    shard = op.cache_shape(
        config, num_blocks=num_blocks, block_size=block_size, dtype=jnp.dtype(dtype)
    )
    axis, axes = attention.cache_head_axis, cache_axes(attention)
    sizes = list(shard.shape)
    if axis is not None:
        sizes[axis] *= num_pieces(mesh, axes)
    return jax.ShapeDtypeStruct(tuple(sizes), shard.dtype, sharding=sharding(mesh, axes))
