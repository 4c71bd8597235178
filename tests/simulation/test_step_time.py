"""The time of a step, from a roofline and from measurements."""

import dataclasses

import numpy as np
import pytest

from jaxllm.plan.buckets import Bucket
from jaxllm.programs.roofline import Bound, Roofline, Window
from jaxllm.scheduler.schedule import Schedule
from jaxllm.simulation.step_time import (
    Line,
    MeasuredTime,
    RooflineTime,
    attended_tokens,
    fit_line,
)

BUCKET = Bucket(decode_only=False, num_tokens=16, num_rows=4, max_block_updates=1)


def schedule_of(num_tokens, context_lens):
    rows = len(num_tokens)
    return Schedule(
        step=0,
        num_decodes=0,
        slots=np.arange(rows, dtype=np.int32),
        num_tokens=np.array(num_tokens, np.int32),
        context_lens=np.array(context_lens, np.int32),
        starts=np.zeros(rows, np.int32),
        samples=np.ones(rows, bool),
        token_ids=np.zeros(sum(num_tokens), np.int32),
        block_updates=np.zeros((0, 4), np.int32),
    )


def test_attended_tokens_are_those_under_the_diagonal():
    # Tokens 8, 9 and 10 of ten see 8, 9 and 10; a decode sees its context.
    assert attended_tokens(schedule_of([3, 1], [10, 7])) == 8 + 9 + 10 + 7


def test_a_roofline_takes_the_slower_of_reading_and_computing():
    line = Roofline(
        bytes_per_second=100,
        flops_per_second=1000,
        bytes_per_step=50,
        flops_per_token=20,
        flops_per_row=5,
        windows=(Window(0, 2, 4), Window(4, 1, 2)),
    )
    schedule = schedule_of([3, 1], [10, 7])
    num_bytes, num_flops = line.attention(schedule.num_tokens, schedule.context_lens)
    # Two layers see all, one sees four.
    assert num_bytes.tolist() == [2 * 10 + 4, 2 * 7 + 4]
    assert num_flops.tolist() == [2 * (2 * 27 + 3 * 4), 2 * (2 * 7 + 4)]
    read = (50 + 24 + 18) / 100
    compute = (20 * 16 + 5 * 4 + 132 + 36) / 1000
    (seconds,) = RooflineTime(stages=(line,), efficiency=0.5, launch_s=3).seconds(BUCKET, schedule)
    assert seconds == pytest.approx(3 + max(read, compute) / 0.5)


def test_sums_over_devices_are_waited_for_while_weights_are_read():
    line = Roofline(
        bytes_per_second=100,
        flops_per_second=1000,
        bytes_per_step=50,
        flops_per_token=20,
        flops_per_row=0,
        windows=(),
        sent_bytes_per_token=6,
        link_bytes_per_second=200,
    )
    # Reading takes 0.5 s whatever there is; a token takes 0.02 s to compute and 0.03 s to add up.
    assert line.bound(9, 1, (0, 0)) == Bound(seconds=0.5, limited_by="memory bandwidth")
    assert line.bound(20, 1, (0, 0)) == Bound(seconds=1.0, limited_by="interconnect")
    fast = dataclasses.replace(line, link_bytes_per_second=600)
    assert fast.bound(25, 1, (0, 0)) == Bound(seconds=0.75, limited_by="arithmetic")
    unknown = dataclasses.replace(line, link_bytes_per_second=0)
    assert unknown.bound(20, 1, (0, 0)).seconds == 0.5


def test_a_measured_line_is_found_again_whatever_one_step_did():
    x = np.arange(1, 40) * 100.0
    y = 0.25 + 1e-4 * x
    y[7] += 100  # something else ran
    line = fit_line(x, y)
    assert line.base_s == pytest.approx(0.25) and line.per_attended_s == pytest.approx(1e-4)
    measured = MeasuredTime(lines={BUCKET: line})
    assert measured.seconds(BUCKET, schedule_of([3, 1], [10, 7])) == pytest.approx([0.25 + 34e-4])


@pytest.mark.parametrize(
    "x, y, line",
    [
        ([5], [2.0], Line(base_s=2.0, per_attended_s=0.0)),
        ([5, 5], [2.0, 4.0], Line(base_s=3.0, per_attended_s=0.0)),
        ([1, 2], [2.0, 1.0], Line(base_s=1.5, per_attended_s=0.0)),
    ],
)
def test_a_line_never_falls(x, y, line):
    assert fit_line(x, y) == line
