"""Plans the second home of KV blocks on the host: how many it holds, and where their files are."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxllm.cache_config import CacheConfig
from jaxllm.cache_groups import CacheGroup, window_of
from jaxllm.errors import refused
from jaxllm.handover_config import HandOverConfig
from jaxllm.plan.memory import format_bytes
from jaxllm.plan.stages import StagePlan

_LEAST_BLOCKS = 8  # in each group; with fewer hardly anything would be found


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """What the host keeps of a replica."""

    places: tuple[int, ...]  # for blocks, by cache group
    block_bytes: tuple[int, ...]  # of a block over all devices, by cache group
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
) -> OffloadPlan | None:
    """Divide the host's memory among the groups as that of the devices is; None: nothing is asked
    for."""
    size = asked.kv_offloading_size
    if size is None:
        return None
    option = "kv_offloading_size"
    if any(stage.state_shapes for stage in stages):
        raise refused(
            option, size, "the model has recurrent layers, whose states are not in blocks"
        )
    if (draft := stages[0].draft) is not None:
        raise refused(option, size, f"{draft.name} has caches of its own; let 'ngram' draft")
    caches = [
        (window_of(config), shape)
        for stage in stages
        for config, shape in zip(stage.attention_configs, stage.cache_shapes, strict=True)
    ]
    if not caches:
        raise refused(option, size, "no layer of the model keeps keys and values")
    num_blocks = {group.window: group.num_blocks for group in groups}
    if any(shape.shape[0] != num_blocks[window] for window, shape in caches):
        raise refused(option, size, "the first axis of a cache of this attention is not its blocks")
    block_bytes = tuple(
        sum(_block_bytes(shape) for window, shape in caches if window == group.window)
        for group in groups
    )
    whole = sum(group.num_blocks * its for group, its in zip(groups, block_bytes, strict=True))
    share = size * 2**30 / whole
    places = tuple(int(group.num_blocks * share) for group in groups)
    if min(places) < _LEAST_BLOCKS:
        least = max(_LEAST_BLOCKS / group.num_blocks for group in groups) * whole
        raise refused(
            option,
            size,
            f"this is too little for {_LEAST_BLOCKS} blocks of each kind of layers; give at least "
            f"{math.ceil(least / 2**20 * 1.01) / 1024:.4f} ({format_bytes(math.ceil(least))})",
        )
    path = asked.kv_offloading_path
    return OffloadPlan(
        places=places,
        block_bytes=block_bytes,
        directory=None if path is None else Path(path).expanduser(),
        directory_bytes=int(asked.kv_offloading_path_size * 2**30),
        hand_over=None if hand_over.kv_role is None else hand_over,
    )


def _block_bytes(cache: jax.ShapeDtypeStruct) -> int:
    return math.prod(cache.shape[1:]) * cache.dtype.itemsize
