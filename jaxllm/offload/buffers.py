"""The two programs that move blocks between the caches of a group and the host.

Blocks of all caches of one shape are in one buffer, `[blocks, caches, ...]`, cut over the devices
as the caches are. There are so many blocks in a buffer for every call: those that a call does not
need repeat its last one.

Snapshots of states are a group behind the cache groups. Its caches are the arrays of snapshots, and
a block is a snapshot.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.cache_groups import window_of
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.plan.stages import StagePlan

# Blocks that one call moves. A block of 64 tokens of an 8B model has 8 MiB: 128 MiB are long enough
# to transfer that the call does not count, and little beside a step's temporaries.
BLOCKS_PER_CALL = 16
# Snapshots are rare and large: one of Qwen3-Next-80B has some 75 MiB.
SNAPSHOTS_PER_CALL = 1


class Buffer(NamedTuple):
    """Blocks of the caches of one shape."""

    caches: tuple[int, ...]  # by their place in DeviceState.caches, or among its snapshots' arrays
    shape: jax.ShapeDtypeStruct  # with the blocks of a call


def num_groups(plan: EnginePlan) -> int:
    """How many groups the host keeps blocks of."""
    return len(plan.cache_groups) + (plan.snapshots is not None)


def is_of_snapshots(plan: EnginePlan, group: int) -> bool:
    """Whether a group is that of the snapshots."""
    return group == len(plan.cache_groups)


def blocks_per_call(plan: EnginePlan, group: int) -> int:
    """How many blocks of a group one call moves."""
    return SNAPSHOTS_PER_CALL if is_of_snapshots(plan, group) else BLOCKS_PER_CALL


def group_buffers(plan: EnginePlan, stage: StagePlan, group: int) -> tuple[Buffer, ...]:
    """The buffers for the blocks of a cache group in a stage."""
    alike: dict[Any, list[int]] = {}
    for index, cache in _arrays(plan, stage, group).items():
        alike.setdefault((cache.shape[1:], cache.dtype, cache.sharding), []).append(index)
    return tuple(
        Buffer(
            tuple(caches),
            jax.ShapeDtypeStruct(
                (blocks_per_call(plan, group), len(caches), *shape),
                dtype,
                sharding=_of_buffer(sharding, on_host=plan.chip.platform != "cpu"),
            ),
        )
        for (shape, dtype, sharding), caches in alike.items()
    )


def cache_shapes(plan: EnginePlan, stage: StagePlan, group: int) -> tuple[Any, ...]:
    """The caches of a group, in the order of its buffers."""
    arrays = _arrays(plan, stage, group)
    buffers = group_buffers(plan, stage, group)
    return tuple(arrays[index] for buffer in buffers for index in buffer.caches)


def _arrays(plan: EnginePlan, stage: StagePlan, group: int) -> dict[int, Any]:
    """The caches of a group in a stage, by their places."""
    if is_of_snapshots(plan, group):
        return dict(enumerate(jax.tree.leaves(stage.snapshot_shapes)))
    window = plan.cache_groups[group].window
    caches = zip(stage.attention_configs, stage.cache_shapes, strict=True)
    return {
        index: cache for index, (config, cache) in enumerate(caches) if window_of(config) == window
    }


def make_gather(buffers: Sequence[Buffer]) -> Any:
    """Make the function that copies blocks of a group's caches to buffers."""

    def gather(caches: tuple[jax.Array, ...], blocks: jax.Array) -> tuple[jax.Array, ...]:
        following = iter(caches)
        return tuple(
            jnp.stack(
                [jnp.take(next(following), blocks, axis=0, mode="clip") for _ in buffer.caches],
                axis=1,
            )
            for buffer in buffers
        )

    return gather


def make_scatter(buffers: Sequence[Buffer]) -> Any:
    """Make the function that copies buffers to blocks of a group's caches, which it consumes."""

    def scatter(
        caches: tuple[jax.Array, ...], blocks: jax.Array, data: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        # From the host's memory, where they are arguments on an accelerator.
        here = [
            jax.device_put(its, _on_devices(buffer))
            for its, buffer in zip(data, buffers, strict=True)
        ]

        def write(place: jax.Array, caches: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            following = iter(caches)
            return tuple(
                jax.lax.dynamic_update_index_in_dim(
                    next(following), one[place, index], blocks[place], axis=0
                )
                for one, buffer in zip(here, buffers, strict=True)
                for index in range(len(buffer.caches))
            )

        return jax.lax.fori_loop(0, len(blocks), write, caches)

    return scatter


def _on_devices(buffer: Buffer) -> NamedSharding:
    """The sharding of a buffer in the devices' memory."""
    sharding = buffer.shape.sharding
    assert isinstance(sharding, NamedSharding)
    return NamedSharding(sharding.mesh, sharding.spec)


def _of_buffer(cache: Any, *, on_host: bool) -> NamedSharding:
    """The sharding of a buffer for caches of this one: a second axis is new."""
    assert isinstance(cache, NamedSharding)
    spec = cache.spec
    spec = PartitionSpec(spec[0], None, *spec[1:]) if len(spec) else PartitionSpec()
    return NamedSharding(cache.mesh, spec, memory_kind="pinned_host" if on_host else None)
