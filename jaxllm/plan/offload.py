"""Plans the second home of KV blocks on the host: how many it holds, and where their files are."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxllm.cache_config import CacheConfig
from jaxllm.cache_groups import CacheGroup, StateSnapshots, window_of
from jaxllm.errors import refused
from jaxllm.handover_config import HandOverConfig
from jaxllm.plan.memory import format_bytes
from jaxllm.plan.stages import StagePlan

_LEAST_BLOCKS = 8  # in each group; with fewer hardly anything would be found
_LEAST_SNAPSHOTS = 2  # of each request one is enough


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """What the host keeps of a replica."""

    # For blocks, by cache group; then for snapshots of states, if the model has states.
    places: tuple[int, ...]
    block_bytes: tuple[int, ...]  # of a block over all devices, likewise
    directory: Path | None  # of files of blocks
    directory_bytes: int
    hand_over: HandOverConfig | None = None  # None: other engines have no part in it

    @property
    def num_bytes(self) -> int:
        return sum(map(operator.mul, self.places, self.block_bytes))

    def __str__(self) -> str:
        return f"{format_bytes(self.num_bytes)} on the host"


def plan_offload(
    asked: CacheConfig,
    hand_over: HandOverConfig,
    stages: Sequence[StagePlan],
    groups: Sequence[CacheGroup],
    snapshots: StateSnapshots | None,
    model_dir: Path,
) -> OffloadPlan | None:
    """Divide the host's memory among the groups as that of the devices is; None: nothing is asked
    for."""
    size = asked.kv_offloading_size
    if size is None:
        return None
    option = "kv_offloading_size"
    has_states = any(stage.state_shapes for stage in stages)
    if has_states and snapshots is None:
        why = "states of recurrent layers are found by their snapshots, and there are none"
        raise refused(option, size, f"{why}; raise num_state_snapshots")
    if has_states and hand_over.kv_role is not None:
        why = "the model has recurrent layers, whose states are not handed over"
        raise refused("kv_role", hand_over.kv_role, f"{why}; leave it out")
    if (draft := stages[0].draft) is not None:
        raise refused(option, size, f"{draft.name} has caches of its own; let 'ngram' draft")
    caches = [
        (window_of(config), shape)
        for stage in stages
        for config, shape in zip(stage.attention_configs, stage.cache_shapes, strict=True)
    ]
    if not caches and not has_states:
        raise refused(option, size, "no layer of the model keeps keys and values")
    num_blocks = {group.window: group.num_blocks for group in groups}
    if any(shape.shape[0] != num_blocks[window] for window, shape in caches):
        raise refused(option, size, "the first axis of a cache of this attention is not its blocks")
    block_bytes = tuple(
        sum(_block_bytes(shape) for window, shape in caches if window == group.window)
        for group in groups
    )
    counts = [group.num_blocks for group in groups]
    least_places = [_LEAST_BLOCKS] * len(groups)
    if snapshots is not None:
        arrays = [one for stage in stages for one in jax.tree.leaves(stage.snapshot_shapes)]
        block_bytes += (sum(map(_block_bytes, arrays)),)
        counts.append(snapshots.count)
        least_places.append(_LEAST_SNAPSHOTS)
    whole = sum(map(operator.mul, counts, block_bytes))
    share = size * 2**30 / whole
    places = tuple(int(count * share) for count in counts)
    if any(map(operator.lt, places, least_places)):
        least = max(map(operator.truediv, least_places, counts)) * whole
        also = f" and {_LEAST_SNAPSHOTS} snapshots of states" if snapshots is not None else ""
        raise refused(
            option,
            size,
            f"this is too little for {_LEAST_BLOCKS} blocks of each kind of layers{also}; give at "
            "least "
            f"{math.ceil(least / 2**20 * 1.01) / 1024:.4f} ({format_bytes(math.ceil(least))})",
        )
    path = asked.kv_offloading_path
    directory = None if path is None else Path(path).expanduser()
    if directory is not None and directory.resolve().is_relative_to(model_dir.resolve()):
        why = (
            "the model's files say whose blocks these are, and blocks among them would change that"
        )
        raise refused(
            "kv_offloading_path",
            path,
            f"it is in the model's directory, {model_dir}: {why}; give a path outside of it",
        )
    return OffloadPlan(
        places=places,
        block_bytes=block_bytes,
        directory=directory,
        directory_bytes=int(asked.kv_offloading_path_size * 2**30),
        hand_over=None if hand_over.kv_role is None else hand_over,
    )


def _block_bytes(cache: jax.ShapeDtypeStruct) -> int:
    return math.prod(cache.shape[1:]) * cache.dtype.itemsize
