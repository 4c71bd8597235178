"""What a step gets from the host: StepInputs, which travel as one packed int32 buffer.

`InputLayout` is the only description of that buffer. The host packs by it (`pack`, vectorised
numpy), the traced step unpacks by it (`unpack`, static slices that cost nothing), and warm-up and
planning take its size. A step has one upload, whatever its number of fields.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxllm_kernels.ragged_paged_attention.api import SHORT_ROW

from jaxllm.plan.buckets import Bucket
from jaxllm.runner.slices import DeviceSlice
from jaxllm.scheduler.schedule import NO_ADAPTER, NO_TOKEN, Schedule

# The token of padding. No vocabulary has it, so its embedding is zero.
PADDING_TOKEN = np.iinfo(np.int32).max


class CopyInputs(NamedTuple):
    """`StateCopies`, as many as `num_loads` and `num_stores` say."""

    num_loads: jax.Array  # i32 []
    num_stores: jax.Array  # i32 []
    loads: jax.Array  # i32 [R, 2]
    stores: jax.Array  # i32 [R, 2]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step's metadata on the device. Padding rows have slot = number of slots, which scatters
    with mode="drop" ignore, and zeros in the other fields."""

    # i32 [T]; CARRIED_TOKEN stands for the slot's last sampled token, DRAFT_TOKEN for one of its
    # drafts, PADDING_TOKEN for padding
    token_ids: jax.Array
    token_rows: jax.Array  # i32 [T]; padding tokens belong to row R - 1
    query_starts: jax.Array  # i32 [R + 1]
    num_decodes: jax.Array  # i32 []
    num_short: jax.Array  # i32 []: rows after the decodes with at most SHORT_ROW tokens
    slots: jax.Array  # i32 [R]
    starts: jax.Array  # i32 [R]; GO_ON if the row begins at the slot's length
    prompt_lens: jax.Array  # i32 [R]
    samples: jax.Array  # bool [R]; late rows sample in `runner.late`
    # i32 [R]: how many of the row's last tokens are drafts; only where rows may have some
    num_drafts: jax.Array | None
    # i32 [R]: the token behind a row that samples none; NO_TOKEN for others. Only for a head that
    # drafts.
    next_tokens: jax.Array | None
    row_params: jax.Array  # i32 [R, columns]: encoded sampling parameters
    # i32 [R]: the slot of each row's adapter, or their number; only in programs with adapters
    adapters: jax.Array | None
    block_updates: jax.Array  # i32 [U, 3]: row of the tables (`table_row`), index in it, block
    state_copies: CopyInputs | None  # only with snapshots of states
    slices: dict[str, dict[str, jax.Array]]  # of the features in this program, i32


class SlotTable:
    """What the host keeps about the request in each slot, to send it with each row. It is one
    array, since a step reads the rows of its slots in one operation."""

    def __init__(self, num_slots: int, num_param_columns: int, max_adapters: int = 0):
        self.max_adapters = max_adapters
        self.adapters = np.full(num_slots, NO_ADAPTER, np.int32)  # of the requests in the slots
        self.columns = np.zeros((num_slots, 1 + num_param_columns), np.int32)
        self.prompt_lens = self.columns[:, 0]
        self.params = self.columns[:, 1:]  # encoded for the sampler


def table_row(group: Any, slot: Any, num_slots: int) -> Any:
    """The row of a slot's block table for one cache group, in the device's block tables."""
    return group * num_slots + slot


def write_block_updates(
    updates: np.ndarray, room: np.ndarray, *, num_slots: int, num_groups: int
) -> np.ndarray:
    """Write (group, slot, index, block) as (row of the tables, index, block), then padding."""
    count = len(updates)
    if count:
        room[:count] = updates[:, 1:]
        if num_groups > 1:
            room[:count, 0] = table_row(updates[:, 0], updates[:, 1], num_slots)
    if count < len(room):
        room[count:, 0] = num_slots * num_groups
    return room


class InputLayout:
    """Where each field of a bucket's StepInputs lies in the packed buffer."""

    def __init__(
        self,
        bucket: Bucket,
        *,
        num_slots: int,
        num_cache_groups: int,
        num_param_columns: int,
        features: Sequence[DeviceSlice] = (),
        speculates: bool = False,
        reads_ahead: bool = False,
        has_snapshots: bool = False,
    ):
        self.bucket = bucket
        # The features in the programs of this bucket, and the fields of this layout by the names
        # that each feature gives them.
        self.features = [feature for feature in features if feature.fields(bucket)]
        self._slices: dict[str, dict[str, str]] = {}
        self._has_drafts = speculates and not bucket.decode_only
        self._num_slots = num_slots
        self._num_cache_groups = num_cache_groups
        tokens, rows = bucket.num_tokens, bucket.num_rows
        shapes: dict[str, tuple[int, ...]] = {
            "token_ids": (tokens,),
            "num_decodes": (),
            "num_short": (),
            "slots": (rows,),
            "starts": (rows,),
            "samples": (rows,),
            # Of `SlotTable`; column by column, so that the step takes each column as one slice.
            "slot_columns": (1 + num_param_columns, rows),
            "block_updates": (bucket.max_block_updates, 3),
        }
        if not bucket.decode_only:
            shapes |= {
                "token_rows": (tokens,),
                "query_starts": (rows + 1,),
            }
        if self._has_drafts:
            shapes["num_drafts"] = (rows,)
        self._reads_ahead = reads_ahead
        if self._reads_ahead:
            shapes["next_tokens"] = (rows,)
        if bucket.has_adapters:
            shapes["adapters"] = (rows,)
        if has_snapshots:
            shapes |= {"num_copies": (2,), "loads": (rows, 2), "stores": (rows, 2)}
        for feature in self.features:
            its = feature.fields(bucket)
            keys = {name: f"{feature.name}.{name}" for name in its}
            shapes |= {keys[name]: shape for name, shape in its.items()}
            self._slices[feature.name] = keys
        self._fields: dict[str, tuple[slice, tuple[int, ...]]] = {}
        offset = 0
        for name, shape in shapes.items():
            end = offset + math.prod(shape)
            self._fields[name] = (slice(offset, end), shape)
            offset = end
        self.size = offset

    def abstract(self) -> jax.ShapeDtypeStruct:
        """Shape of the packed buffer, for compiling."""
        return jax.ShapeDtypeStruct((self.size,), np.int32)

    def pack(self, schedule: Schedule, table: SlotTable) -> np.ndarray:
        """Build the buffer of a step. `overflow` has the block updates that do not fit.

        Every step gets a new buffer: on CPU the device may read it in place while the host packs
        the next one.
        """
        buffer = np.zeros(self.size, np.int32)
        view = {name: buffer[span].reshape(shape) for name, (span, shape) in self._fields.items()}
        rows, tokens = schedule.num_rows, schedule.total_tokens
        view["token_ids"][:tokens] = schedule.token_ids
        view["token_ids"][tokens:] = PADDING_TOKEN
        view["num_decodes"][...] = schedule.num_decodes
        up_to_short = np.searchsorted(schedule.num_tokens, SHORT_ROW, side="right")
        view["num_short"][...] = up_to_short - schedule.num_decodes
        view["slots"][:rows] = schedule.slots
        view["slots"][rows:] = self._num_slots
        view["starts"][:rows] = schedule.starts
        view["samples"][:rows] = schedule.samples
        if schedule.late_rows is not None:
            view["samples"][schedule.late_rows] = 0
        view["slot_columns"][:, :rows] = table.columns[schedule.slots].T
        if self.bucket.has_adapters:
            adapters = table.adapters[schedule.slots]
            view["adapters"][...] = table.max_adapters
            view["adapters"][:rows][adapters != NO_ADAPTER] = adapters[adapters != NO_ADAPTER]
        updates = schedule.block_updates[: self.bucket.max_block_updates]
        self._write_updates(updates, view["block_updates"])
        if not self.bucket.decode_only:
            view["token_rows"][:tokens] = np.repeat(
                np.arange(rows, dtype=np.int32), schedule.num_tokens
            )
            view["token_rows"][tokens:] = self.bucket.num_rows - 1
            np.cumsum(schedule.num_tokens, out=view["query_starts"][1 : rows + 1])
            view["query_starts"][rows + 1 :] = tokens
        if schedule.state_copies is not None:
            for index, name in enumerate(("loads", "stores")):
                pairs = getattr(schedule.state_copies, name)
                view["num_copies"][index] = len(pairs)
                view[name][: len(pairs)] = pairs
        if schedule.num_drafts is not None:
            view["num_drafts"][:rows] = schedule.num_drafts
        if self._reads_ahead:
            view["next_tokens"][...] = NO_TOKEN
            if schedule.next_tokens is not None:
                view["next_tokens"][:rows] = schedule.next_tokens
        for feature in self.features:
            its = {name: view[key] for name, key in self._slices[feature.name].items()}
            feature.pack(its, schedule.slices.get(feature.name))
        return buffer

    def overflow(self, schedule: Schedule) -> np.ndarray:
        """The block updates that `pack` has no room for, i32 [n, 3]. Long cached prefixes cause
        them."""
        updates = schedule.block_updates[self.bucket.max_block_updates :]
        return self._write_updates(updates, np.empty((len(updates), 3), np.int32))

    def _write_updates(self, updates: np.ndarray, room: np.ndarray) -> np.ndarray:
        return write_block_updates(
            updates, room, num_slots=self._num_slots, num_groups=self._num_cache_groups
        )

    def unpack(self, buffer: jax.Array) -> StepInputs:
        """Cut the buffer into fields; traced."""
        field: dict[str, Any] = {
            name: buffer[span].reshape(shape) for name, (span, shape) in self._fields.items()
        }
        field["samples"] = field["samples"] != 0
        columns = field.pop("slot_columns")
        field["prompt_lens"], field["row_params"] = columns[0], columns[1:].T
        if self.bucket.decode_only:
            # Token t is row t. Padding rows have no tokens.
            rows = jax.numpy.arange(self.bucket.num_rows + 1, dtype=np.int32)
            field["token_rows"] = rows[:-1]
            field["query_starts"] = jax.numpy.minimum(rows, field["num_decodes"])
        slices = {
            feature: {name: field.pop(key) for name, key in names.items()}
            for feature, names in self._slices.items()
        }
        absent = {"num_drafts": None, "next_tokens": None, "adapters": None, "state_copies": None}
        if "num_copies" in field:
            field["state_copies"] = CopyInputs(
                *field.pop("num_copies"), loads=field.pop("loads"), stores=field.pop("stores")
            )
        return StepInputs(**{**absent, **field}, slices=slices)
