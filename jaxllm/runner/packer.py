"""Packs a Schedule: chooses the program that runs it, and builds the program's buffer."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.plan.buckets import Bucket, BucketTable
from jaxllm.runner.ahead import AheadLayout, PackedAhead
from jaxllm.runner.draft_model import ReadLayout
from jaxllm.runner.inputs import InputLayout, SlotTable
from jaxllm.runner.late import LateKey, LateLayout
from jaxllm.runner.slices import DeviceSlice
from jaxllm.sampling import row_params
from jaxllm.sampling.logits_processor import LogitsProcessor
from jaxllm.scheduler.schedule import (
    NO_ADAPTER,
    Admission,
    DraftReads,
    LateMasks,
    Schedule,
)


class PackedStep(NamedTuple):
    """What a Schedule becomes before it is dispatched."""

    bucket: Bucket
    buffer: np.ndarray  # i32, by the bucket's InputLayout
    # Block-table changes that the buffer has no room for, i32 [n, 3]; usually empty.
    more_block_updates: np.ndarray
    step: int
    carried_from: int | None  # as in the Schedule


class StepPacker:
    """Packs Schedules. Keeps what each row needs about the request in its slot."""

    def __init__(
        self,
        buckets: tuple[Bucket, ...],
        *,
        num_slots: int,
        num_cache_groups: int,
        processors: tuple[LogitsProcessor, ...],
        features: Sequence[DeviceSlice] = (),
        late_keys: Collection[LateKey] = (),
        num_mask_words: int = 0,
        speculates: bool = False,
        reads_ahead: bool = False,
        read_sizes: Sequence[int] = (),
        num_read_rows: int = 0,
        num_ahead_rows: int = 0,
        max_adapters: int = 0,
        has_snapshots: bool = False,
    ):
        """`late_keys` are of the programs that sample late rows. A draft model reads at most
        `num_read_rows` texts at a time, in programs of `read_sizes` tokens. For
        `num_ahead_rows` late rows at most drafts are made ahead."""
        columns = row_params.num_columns(processors)
        self.layouts = {
            bucket: InputLayout(
                bucket,
                num_slots=num_slots,
                num_cache_groups=num_cache_groups,
                num_param_columns=columns,
                features=features,
                speculates=speculates,
                reads_ahead=reads_ahead,
                has_snapshots=has_snapshots,
            )
            for bucket in buckets
        }
        self.late_layouts = {
            key: LateLayout(
                key,
                num_slots=num_slots,
                num_param_columns=columns,
                num_words=num_mask_words,
            )
            for key in sorted(late_keys)
        }
        self.read_layouts = {
            size: ReadLayout(size, num_rows=num_read_rows, num_slots=num_slots)
            for size in read_sizes
        }
        self.ahead_layout: AheadLayout | None = None
        if num_ahead_rows:
            self.ahead_layout = AheadLayout(
                num_ahead_rows,
                num_slots=num_slots,
                num_cache_groups=num_cache_groups,
                num_param_columns=columns,
            )
        self._buckets = BucketTable(buckets)
        self._processors = processors
        self._table = SlotTable(num_slots, columns, max_adapters)

    def admit(self, admission: Admission) -> None:
        """Note what the rows of a newly admitted request need."""
        slot = admission.slot
        self._table.adapters[slot] = admission.adapter
        self._table.prompt_lens[slot] = len(admission.prompt_token_ids)
        self._table.params[slot] = row_params.encode(
            admission.sampling_params, admission.seed, self._processors
        )

    def pack(self, schedule: Schedule) -> PackedStep:
        """Choose the program and build its buffer. All admissions must have been noted."""
        bucket = self._buckets.find(
            num_tokens=schedule.total_tokens,
            num_rows=schedule.num_rows,
            decode_only=schedule.decode_only,
            has_adapters=self._table.max_adapters > 0
            and bool((self._table.adapters[schedule.slots] != NO_ADAPTER).any()),
        )
        layout = self.layouts[bucket]
        return PackedStep(
            bucket,
            layout.pack(schedule, self._table),
            layout.overflow(schedule),
            step=schedule.step,
            carried_from=schedule.carried_from,
        )

    def pack_reads(self, reads: DraftReads) -> tuple[int, np.ndarray]:
        """Choose the program in which a draft model reads, and build its buffer."""
        size = next(size for size in self.read_layouts if size >= len(reads.token_ids))
        return size, self.read_layouts[size].pack(reads)

    def pack_ahead(self, schedule: Schedule) -> PackedAhead | None:
        """Build the buffer of the program that drafts for the late rows of a step; None: they have
        no such drafts. All admissions must have been noted."""
        layout = self.ahead_layout
        return None if layout is None else layout.pack(schedule, self._table)

    def pack_late(self, schedule: Schedule, key: LateKey, masks: LateMasks) -> np.ndarray:
        """Build the buffer of the program that samples the late rows of a step. No request may have
        been admitted since the step was packed."""
        return self.late_layouts[key].pack(schedule, self._table, masks)
