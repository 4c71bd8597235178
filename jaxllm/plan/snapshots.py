"""Chooses how many snapshots of recurrent layers' states are kept, and how far apart."""

from collections.abc import Sequence

from jaxllm.cache_groups import StateSnapshots
from jaxllm.config import CacheConfig
from jaxllm.errors import refused
from jaxllm.plan.memory import free_bytes, own_device
from jaxllm.plan.stages import StagePlan

# With it, a prompt of some hundred tokens is found again, and a long answer is rarely copied.
_STRIDE = 512
# The share of the memory that is free beside weights, states, adapters and what steps leave.
_SHARE = 0.1
# More for each request are rarely of use.
_MOST_PER_REQUEST = 2


def choose_snapshots(
    asked: CacheConfig,
    stages: Sequence[StagePlan],
    *,
    block_size: int,
    max_num_seqs: int,
    adapters_bytes: Sequence[int],
    num_devices: int,
) -> StateSnapshots | None:
    """Choose the snapshots of a model with these stages, none of which has any yet; None: requests
    share no prefixes, or the model has no states. `adapters_bytes` are those of adapters in each
    stage. CPU devices share the memory, and all replicas have `num_devices`."""
    stride, count = asked.mamba_block_size, asked.num_state_snapshots
    state_bytes = max(stage.states_bytes for stage in stages) // max_num_seqs
    if not state_bytes:
        for option, value in (("mamba_block_size", stride), ("num_state_snapshots", count)):
            if value is not None:
                raise refused(option, value, "the model has no recurrent layers; leave it out")
        return None
    if stride is None:
        stride = -(-_STRIDE // block_size) * block_size
    if stride % block_size:
        raise refused(
            "mamba_block_size", stride, f"give a multiple of the block size, which is {block_size}"
        )
    if asked.enable_prefix_caching is False:
        return None
    if count is None:
        left = min(
            free_bytes(asked, own_device(stage.mesh.devices.flat), num_devices)
            - stage.weights_bytes
            - stage.states_bytes
            - stage.between.num_bytes
            - adapters
            for stage, adapters in zip(stages, adapters_bytes, strict=True)
        )
        # A power of two, so that the next start, which may find a little more or less free memory,
        # has programs of the same shapes.
        fitting = max(0, int(left * _SHARE)) // state_bytes
        count = min(1 << fitting.bit_length() >> 1, _MOST_PER_REQUEST * max_num_seqs)
    if not count and asked.enable_prefix_caching:
        raise refused(
            "enable_prefix_caching",
            True,
            "the model has recurrent layers, and there are no snapshots of their states from which "
            "another request could go on; leave it out, or give num_state_snapshots at least 1",
        )
    return StateSnapshots(count=count, stride=stride) if count else None
