"""When the next step is planned, by how long those before it took."""

import numpy as np
import pytest

from jaxllm.engine.pace import Pace
from jaxllm.scheduler.schedule import Schedule


def schedule_of(*num_tokens):
    rows = np.array(num_tokens, np.int32)
    return Schedule(
        step=0,
        num_decodes=int((rows == 1).sum()),
        slots=rows,
        num_tokens=rows,
        context_lens=rows,
        starts=rows,
        samples=rows > 0,
        token_ids=np.zeros(rows.sum(), np.int32),
        block_updates=np.zeros((0, 4), np.int32),
    )


DECODE, PROMPT = schedule_of(1, 1), schedule_of(1, 100)


def run(pace, schedule, took, *, times=1, was_seen=True):
    for _ in range(times):
        pace.begin(schedule, 100.0)
        pace.end(100.0 + took, was_seen)


def test_nothing_is_put_off_before_such_a_step_has_been_seen():
    pace = Pace()
    run(pace, DECODE, 1.0)
    pace.begin(PROMPT, 100.0)
    assert pace.spare_s(100.0) == 0


def test_it_is_put_off_for_most_of_a_step_of_its_kind():
    pace = Pace()
    run(pace, DECODE, 1.0)
    run(pace, PROMPT, 8.0)
    pace.begin(DECODE, 100.0)
    assert pace.spare_s(100.0) == pytest.approx(0.75)
    assert pace.spare_s(100.5) == pytest.approx(0.25)
    assert pace.spare_s(101.0) == 0
    pace.begin(PROMPT, 100.0)
    assert pace.spare_s(100.0) == pytest.approx(6.0)


def test_the_time_that_planning_takes_is_kept_free():
    pace = Pace()
    pace.planned(0.3)
    run(pace, DECODE, 1.0)
    pace.begin(DECODE, 100.0)
    assert pace.spare_s(100.0) == pytest.approx(0.45)
    for _ in range(50):
        pace.planned(0.1)
    assert pace.spare_s(100.0) == pytest.approx(0.65)


def test_nothing_is_put_off_when_steps_are_short():
    pace = Pace()
    run(pace, DECODE, 0.002)
    pace.begin(DECODE, 100.0)
    assert pace.spare_s(100.0) == 0


def test_one_short_step_counts_at_once_and_long_ones_slowly():
    pace = Pace()
    run(pace, DECODE, 1.0)
    run(pace, DECODE, 0.5)
    pace.begin(DECODE, 100.0)
    assert pace.spare_s(100.0) == pytest.approx(0.375)
    run(pace, DECODE, 1.0)
    assert pace.spare_s(100.0) == pytest.approx(0.375 * 1.1)
    run(pace, DECODE, 1.0, times=20)
    assert pace.spare_s(100.0) == pytest.approx(0.75)


def test_what_was_seen_too_late_is_not_believed():
    pace = Pace()
    run(pace, DECODE, 10.0, was_seen=False)  # it may have ended long before
    pace.begin(DECODE, 100.0)
    assert pace.spare_s(100.0) == 0
    run(pace, DECODE, 1.0)
    run(pace, DECODE, 3.0, was_seen=False)
    pace.begin(DECODE, 100.0)
    assert pace.spare_s(100.0) == 0
