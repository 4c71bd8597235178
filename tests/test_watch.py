"""What is taken to hang, and what only takes its time."""

import threading

import pytest

from jaxllm.config import EngineConfig
from jaxllm.watch import PATIENCE, Silence, Watch, Work

LIMIT_S = 10


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now

    def seconds(self, count):
        """Lets time pass, a second after the other."""
        for _ in range(count):
            self.now += 1.0
            yield


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watch(clock):
    """Of an engine whose work a test says."""
    config = EngineConfig.create("some-model", engine_iteration_timeout=LIMIT_S)
    return Watch(config, on_hang=pytest.fail, clock=clock)


def test_silence_is_too_long_after_its_limit_and_begins_anew_with_every_word(clock):
    silence = Silence(LIMIT_S, clock)
    assert [silence.is_too_long() for _ in clock.seconds(12)] == [False] * 10 + [True] * 2
    silence.heard()
    assert not any(silence.is_too_long() for _ in clock.seconds(10))


def test_who_was_away_itself_has_heard_no_silence(clock):
    silence = Silence(LIMIT_S, clock)
    assert not any(silence.is_too_long() for _ in clock.seconds(9))
    clock.now += 3600.0  # the machine sleeps
    assert [silence.is_too_long() for _ in clock.seconds(12)] == [False] * 11 + [True]


def test_without_a_limit_silence_may_last(clock):
    silence = Silence(0, clock)
    assert not any(silence.is_too_long() for _ in clock.seconds(5000))


def test_a_step_that_never_ends_hangs_and_idle_loops_do_not(watch, clock):
    def loop():
        return Work("its loop", int(clock.now))

    watch.at_work = lambda: [loop()]
    assert [watch.look() for _ in clock.seconds(100)] == [None] * 100
    watch.at_work = lambda: [loop(), Work("the step of replica 1", 7)]
    *before, reason = [watch.look() for _ in clock.seconds(12)]
    assert before == [None] * 11
    assert "the step of replica 1 has not got on for 11 s" in reason
    assert "(engine_iteration_timeout allows 10)" in reason


def test_what_is_done_is_forgotten(watch, clock):
    for number in range(30):
        # The same step again, as far as names and numbers tell; between them there was none.
        watch.at_work = lambda: [Work("the step", 7)]
        assert [watch.look() for _ in clock.seconds(10)] == [None] * 10, number
        watch.at_work = lambda: []
        assert watch.look() is None


def test_what_takes_long_by_its_nature_may(watch, clock):
    watch.at_work = lambda: [Work("Sleep", 1, takes_long=True)]
    assert [watch.look() for _ in clock.seconds(LIMIT_S * PATIENCE)] == [None] * 120
    assert [bool(watch.look()) for _ in clock.seconds(2)] == [False, True]


def test_steps_that_may_compile_may_take_long(clock):
    config = EngineConfig.create("some-model", engine_iteration_timeout=LIMIT_S, enforce_eager=True)
    watch = Watch(config, on_hang=pytest.fail, clock=clock)
    watch.at_work = lambda: [Work("the step", 1)]
    assert [watch.look() for _ in clock.seconds(LIMIT_S * PATIENCE)] == [None] * 120


def test_the_thread_says_that_it_lives_and_then_that_something_hangs(capfd):
    said, looks = threading.Event(), threading.Semaphore(0)
    reasons = []

    def hangs(reason):
        reasons.append(reason)
        said.set()

    config = EngineConfig.create("some-model", engine_iteration_timeout=1)
    watch = Watch(config, on_hang=hangs, on_look=looks.release)
    watch.at_work = lambda: [Work("the step", 1)]
    watch.start()
    assert said.wait(60) and "the step has not got on" in reasons[0]
    assert looks.acquire(timeout=0) and looks.acquire(timeout=0)
    watch.join(60)
    assert not watch.is_alive()
    assert "in test_the_thread_says_that_it_lives" in capfd.readouterr().err  # where threads are


def test_limits_are_seconds_or_none():
    for name, value in (
        ("engine_iteration_timeout", 0.5),
        ("engine_iteration_timeout", -1.0),
        ("engine_iteration_timeout", float("nan")),
        ("engine_heartbeat_timeout", 2),
        ("engine_heartbeat_timeout", float("inf")),
    ):
        with pytest.raises(ValueError, match=f"{name}=.*seconds, or 0 for no limit"):
            EngineConfig.create("some-model", **{name: value})
        EngineConfig.create("some-model", **{name: 0})
