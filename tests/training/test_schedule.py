"""The learning rate over a run, and where a run ends."""

import pytest

from jaxllm.training.schedule import Schedule


def schedule(**options) -> Schedule:
    defaults = {"steps": 100, "seconds": None, "warmup_steps": 10, "decay_share": 0.5}
    return Schedule(**{"learning_rate": 2.0} | defaults | options)


def test_the_rate_rises_stays_and_falls():
    rates = [schedule().rate(step, 0.0) for step in (0, 4, 9, 49, 75, 100)]
    assert rates == pytest.approx([0.2, 1.0, 2.0, 2.0, 1.0, 0.0])


def test_while_it_stays_the_end_does_not_matter():
    for step in range(25):
        assert schedule(steps=50).rate(step, 0.0) == schedule(steps=1000).rate(step, 0.0)


def test_a_run_ends_by_steps_or_time_whatever_comes_first():
    both = schedule(seconds=60.0)
    assert both.progress(50, 6.0) == 0.5
    assert both.progress(5, 45.0) == 0.75
    assert both.progress(5, 61.0) == 1.0 == both.progress(101, 0.0)
    assert both.rate(50, 45.0) == 1.0


def test_neither_rise_nor_fall():
    assert schedule(warmup_steps=0, decay_share=0.0).rate(0, 0.0) == 2.0
