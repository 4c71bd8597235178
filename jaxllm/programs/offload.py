"""What the host keeps of the KV cache, and whether that pays."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.programs.roofline import Bound

# From the host's memory to a device: what PCIe 5 brings a GPU and what was reported of TPUs.
HOST_BYTES_PER_SECOND = 45e9


@dataclass(frozen=True, kw_only=True)
class OffloadReport:
    """What the host keeps, and whether it pays: the least times of a block of the report's context,
    to come back over the bus and to be computed again. None if the chip's rates are not known."""

    num_bytes: int
    num_blocks: tuple[int, ...]  # by cache group
    num_snapshots: int  # of states
    # That a block of each cache group takes over the bus, then a snapshot.
    block_seconds: tuple[float, ...]
    seconds_to_load: float | None
    seconds_to_compute: float | None


def report_offload(plan: EnginePlan, chunks: Sequence[Bound | None]) -> OffloadReport | None:
    """Report what the host keeps; None: nothing. `chunks` has the least time of the largest chunk
    of one request on each stage."""
    if plan.offload is None:
        return None
    # In a pipeline the stages work side by side: the slowest one sets the pace of chunks.
    slowest = max((bound.seconds for bound in chunks if bound), default=None)
    block_bytes = max(sum(stage.block_bytes) for stage in plan.stages)
    return OffloadReport(
        num_bytes=plan.offload.num_bytes,
        num_blocks=plan.offload.places[: len(plan.cache_groups)],
        num_snapshots=plan.offload.places[-1] if plan.snapshots is not None else 0,
        # Each device has a bus of its own.
        block_seconds=tuple(
            its / plan.num_devices / HOST_BYTES_PER_SECOND for its in plan.offload.block_bytes
        ),
        seconds_to_load=block_bytes / HOST_BYTES_PER_SECOND if slowest else None,
        seconds_to_compute=slowest * plan.block_size / plan.max_num_batched_tokens
        if slowest
        else None,
    )
