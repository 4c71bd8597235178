"""The stages of a pipeline: the layers, devices and caches of each.

Without pipeline parallelism there is one stage, which is the whole model. With it, a step passes
through the stages one after the other, while the other stages run other steps.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
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
from jaxllm.plan.draft_plan import DraftPlan
from jaxllm.plural import counted
from jaxllm.sampling.slot_state import SlotState
from jaxllm.sampling_params import MAX_STEP_LOGPROBS
from jaxllm.speculative_config import Speculation


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
    weights_bytes: int  # on one device, with those that draft
    draft: DraftPlan | None = None

    @property
    def model_weights_bytes(self) -> int:
        """The bytes of weights on one device, without those that draft."""
        return self.weights_bytes - (0 if self.draft is None else self.draft.weights_bytes)

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


def activation_bytes(
    stage: StagePlan, num_stages: int, *, num_tokens: int, hidden_size: int, itemsize: int
) -> int:
    """The bytes of the largest steps' hidden states on each device of a stage. Each step in flight
    has those that come in and those that go out."""
    num_sides = (not stage.part.embeds) + (not stage.part.has_head)
    return num_sides * (num_stages + 1) * num_tokens * hidden_size * itemsize


def expert_weights(architecture: Architecture, part: ModelPart) -> Counter[float]:
    """The number of weights of all experts of a part, by the share of them that a token chooses."""
    counts = Counter[float]()
    for index in part.layers:
        for ffn in architecture.layers[index].ffns:
            if isinstance(ffn, MoESpec):
                size = ffn.num_weights(architecture.hidden_size)
                counts[ffn.num_choices / ffn.num_experts] += size
    return counts


def logits_sharding(mesh: Mesh, *, host_reads: bool) -> NamedSharding:
    """The sharding of the logits that a step leaves, f32 [R, V]: by vocabulary, as they are
    computed. If several processes have devices of the mesh and each reads the logits, every device
    has all of them."""
    return sharding(mesh, () if host_reads and mesh.is_multi_process else (None, "vocab"))


def sampling_bytes(
    mesh: Mesh,
    num_stages: int,
    *,
    num_tokens: int,
    num_rows: int,
    num_logits: int,
    max_logprobs: int,
    samples_late: bool,
    max_model_len: int,
    speculation: Speculation | None = None,
    kept_bytes: int = 0,
) -> int:
    """The bytes for sampling on each device: the state of the slots, and the outputs of the steps
    in flight and of the next one. `kept_bytes` are those that a head keeps of a
    slot, and of a draft that the second program verifies."""
    of_device = num_logits // num_pieces(mesh, ("vocab",))
    tables = jax.tree.leaves(SlotState.abstract(num_rows, of_device, max_model_len))
    in_slots = sum(table.size * table.dtype.itemsize for table in tables)
    # An id and a value for each logprob, a rank and a normaliser for each position.
    of_position = 8 * (1 + min(max_logprobs, MAX_STEP_LOGPROBS)) + 8
    of_step = (num_tokens + num_rows) * of_position
    if speculation is not None:
        of_step += num_rows * speculation.num_drafts * of_position
        # The tokens of every request, or the one before its newest, and its drafts.
        kept = max_model_len if speculation.proposes else 1
        in_slots += num_rows * (4 * (kept + speculation.num_drafts) + kept_bytes)
    host_reads = max_logprobs > MAX_STEP_LOGPROBS
    if host_reads or samples_late:
        logits = logits_sharding(mesh, host_reads=host_reads)
        places = num_rows
        if samples_late and speculation is not None and speculation.verifies_late:
            behind_drafts = min(num_rows, speculation.max_rows) * speculation.num_drafts
            places += behind_drafts
            in_slots += behind_drafts * kept_bytes
        of_step += 4 * math.prod(logits.shard_shape((places, num_logits)))
    return in_slots + (1 + num_stages) * of_step


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
