import dataclasses

import jax
import numpy as np
import pytest

from jaxllm.plan.buckets import Bucket
from jaxllm.runner.inputs import PADDING_TOKEN, InputLayout, SlotTable
from jaxllm.scheduler.schedule import CARRIED_TOKEN, GO_ON, Schedule

NUM_SLOTS = 6
COLUMNS = 3
TABLE = SlotTable(NUM_SLOTS, COLUMNS)
TABLE.params[:] = np.arange(NUM_SLOTS * COLUMNS).reshape(NUM_SLOTS, COLUMNS)
TABLE.prompt_lens[:] = 10 + np.arange(NUM_SLOTS)


def int32(*values):
    return np.array(values, np.int32)


def layout(bucket: Bucket, *features) -> InputLayout:
    return InputLayout(
        bucket,
        num_slots=NUM_SLOTS,
        num_cache_groups=2,
        num_param_columns=COLUMNS,
        features=features,
    )


def unpacked(layout: InputLayout, schedule: Schedule):
    inputs = jax.jit(layout.unpack)(layout.pack(schedule, TABLE))
    return jax.tree.map(np.asarray, inputs)


@pytest.fixture
def mixed_schedule() -> Schedule:
    """A decode in slot 4 and a chunk of three tokens in slot 1."""
    return Schedule(
        step=7,
        num_decodes=1,
        slots=int32(4, 1),
        num_tokens=int32(1, 3),
        context_lens=int32(20, 8),
        starts=int32(GO_ON, 5),
        samples=np.array([True, False]),
        token_ids=int32(CARRIED_TOKEN, 11, 12, 13),
        block_updates=int32(0, 1, 0, 9, 1, 1, 1, 3).reshape(2, 4),
    )


def test_mixed_step_arrives_as_it_was_packed(mixed_schedule):
    bucket = Bucket(decode_only=False, num_tokens=8, num_rows=3, max_block_updates=4)
    inputs = unpacked(layout(bucket), mixed_schedule)
    assert inputs.token_ids.tolist() == [CARRIED_TOKEN, 11, 12, 13] + [PADDING_TOKEN] * 4
    assert inputs.token_rows.tolist() == [0, 1, 1, 1, 2, 2, 2, 2]
    assert inputs.query_starts.tolist() == [0, 1, 4, 4]
    assert inputs.num_decodes == 1
    assert inputs.num_short == 1
    assert inputs.slots.tolist() == [4, 1, NUM_SLOTS]
    assert inputs.starts.tolist() == [GO_ON, 5, 0]
    assert inputs.prompt_lens.tolist() == [14, 11, 0]
    assert inputs.samples.tolist() == [True, False, False]
    assert inputs.row_params.tolist() == [[12, 13, 14], [3, 4, 5], [0, 0, 0]]
    assert inputs.block_updates[:2].tolist() == [[1, 0, 9], [NUM_SLOTS + 1, 1, 3]]
    assert inputs.block_updates[2:, 0].tolist() == [2 * NUM_SLOTS, 2 * NUM_SLOTS]
    assert inputs.slices == {}


def test_decode_step_has_a_token_per_row():
    schedule = Schedule(
        step=0,
        num_decodes=2,
        slots=int32(2, 5),
        num_tokens=int32(1, 1),
        context_lens=int32(3, 4),
        starts=int32(GO_ON, GO_ON),
        samples=np.array([True, True]),
        token_ids=int32(CARRIED_TOKEN, CARRIED_TOKEN),
        block_updates=np.zeros((0, 4), np.int32),
    )
    bucket = Bucket(decode_only=True, num_tokens=4, num_rows=4, max_block_updates=4)
    inputs = unpacked(layout(bucket), schedule)
    assert inputs.token_ids.tolist() == [CARRIED_TOKEN, CARRIED_TOKEN, PADDING_TOKEN, PADDING_TOKEN]
    assert inputs.token_rows.tolist() == [0, 1, 2, 3]
    assert inputs.query_starts.tolist() == [0, 1, 2, 2, 2]
    assert inputs.slots.tolist() == [2, 5, NUM_SLOTS, NUM_SLOTS]
    assert inputs.slices == {}


def test_block_updates_beyond_the_room_are_left_over(mixed_schedule):
    bucket = Bucket(decode_only=False, num_tokens=8, num_rows=3, max_block_updates=1)
    small = layout(bucket)
    assert unpacked(small, mixed_schedule).block_updates.tolist() == [[1, 0, 9]]
    assert small.overflow(mixed_schedule).tolist() == [[NUM_SLOTS + 1, 1, 3]]


def test_each_step_gets_a_buffer_of_its_own(mixed_schedule):
    bucket = Bucket(decode_only=False, num_tokens=8, num_rows=3, max_block_updates=4)
    first = layout(bucket).pack(mixed_schedule, TABLE)
    second = layout(bucket).pack(mixed_schedule, TABLE)
    assert not np.shares_memory(first, second)


class Doubled:
    """A feature with a number for each row, and one for a step; the latter in mixed steps only."""

    name = "doubled"

    def fields(self, bucket):
        return {"rows": (bucket.num_rows,)} | ({} if bucket.decode_only else {"all": ()})

    def pack(self, fields, its):
        assert not any(field.any() for field in fields.values())
        if its is None:
            fields["rows"][...] = -1
            return
        fields["rows"][: len(its["rows"])] = 2 * its["rows"]
        if "all" in fields:
            fields["all"][...] = its["rows"].sum()


class MixedOnly(Doubled):
    name = "mixed_only"

    def fields(self, bucket):
        return {} if bucket.decode_only else super().fields(bucket)


def test_slices_arrive_as_their_features_have_packed_them(mixed_schedule):
    bucket = Bucket(decode_only=False, num_tokens=8, num_rows=3, max_block_updates=4)
    both = layout(bucket, Doubled(), MixedOnly())
    schedule = dataclasses.replace(mixed_schedule, slices={"doubled": {"rows": int32(5, 6)}})
    inputs = unpacked(both, schedule)
    its = inputs.slices["doubled"]
    assert its["rows"].tolist() == [10, 12, 0] and its["all"] == 11
    # Who has no slice in the Schedule has been switched off.
    assert inputs.slices["mixed_only"]["rows"].tolist() == [-1, -1, -1]
    # Nothing else has moved.
    assert inputs.token_ids.tolist() == unpacked(layout(bucket), schedule).token_ids.tolist()
    assert both.size == layout(bucket).size + 2 * (3 + 1)


def test_a_feature_without_fields_is_not_in_the_program():
    bucket = Bucket(decode_only=True, num_tokens=4, num_rows=4, max_block_updates=4)
    assert [f.name for f in layout(bucket, Doubled(), MixedOnly()).features] == ["doubled"]
    assert layout(bucket, MixedOnly()).size == layout(bucket).size
