"""The host half of a step on the device side: which program runs it, and the buffer it gets."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.plan.buckets import Bucket, BucketTable
from jaxllm.runner.inputs import InputLayout
from jaxllm.runner.slices import DeviceSlice
from jaxllm.sampling import row_params
from jaxllm.sampling.logits_processor import LogitsProcessor
from jaxllm.scheduler.schedule import Admission, Schedule


class PackedStep(NamedTuple):
    """What a Schedule becomes before it is dispatched."""

    bucket: Bucket
    buffer: np.ndarray  # i32, by the bucket's InputLayout
    # Block-table changes that the buffer has no room for, i32 [n, 3]; rarely any.
    more_block_updates: np.ndarray
    step: int
    carried_from: int | None  # as in the Schedule


class StepPacker:
    """Packs Schedules. Keeps the encoded sampling parameters of the request in each slot."""

    def __init__(
        self,
        buckets: tuple[Bucket, ...],
        *,
        num_slots: int,
        processors: tuple[LogitsProcessor, ...],
        features: Sequence[DeviceSlice] = (),
    ):
        columns = row_params.num_columns(processors)
        self.layouts = {
            bucket: InputLayout(
                bucket, num_slots=num_slots, num_param_columns=columns, features=features
            )
            for bucket in buckets
        }
        self._buckets = BucketTable(buckets)
        self._processors = processors
        self._slot_params = np.zeros((num_slots, columns), np.int32)

    def admit(self, admission: Admission) -> None:
        """Note the parameters of a request that takes a slot."""
        self._slot_params[admission.slot] = row_params.encode(
            admission.sampling_params, admission.seed, self._processors
        )

    def pack(self, schedule: Schedule) -> PackedStep:
        """Choose the program and build its buffer. All admissions must have been noted."""
        bucket = self._buckets.find(
            num_tokens=schedule.total_tokens,
            num_rows=schedule.num_rows,
            decode_only=schedule.decode_only,
        )
        layout = self.layouts[bucket]
        return PackedStep(
            bucket,
            layout.pack(schedule, self._slot_params),
            layout.overflow(schedule),
            step=schedule.step,
            carried_from=schedule.carried_from,
        )
