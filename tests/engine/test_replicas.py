"""Replicas on devices that are done with a step when the test says so."""

import queue
import threading

import pytest

from jaxllm import SamplingParams
from jaxllm.config import EngineConfig
from jaxllm.engine.busy_loop import BusyLoop
from jaxllm.engine.commands import GetStats
from jaxllm.engine.core import EngineCore
from jaxllm.engine.replicas import Replicas
from jaxllm.messages import EngineRequest
from jaxllm.metrics.stats import EngineStats
from jaxllm.watch import Work
from tests.stand_in import StandIn


@pytest.fixture
def devices():
    return [StandIn(), StandIn()]


@pytest.fixture(params=[True, False], ids=["overlap", "plain"])
def replicas(devices, request):
    config = EngineConfig.create(
        "model", max_model_len=256, async_scheduling=request.param, check_invariants=True
    )
    return Replicas([EngineCore(config, device) for device in devices])


def add(replicas, request_id, max_tokens):
    """Returns the replica that has it now."""
    request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=[3, 4, 5],
        sampling_params=SamplingParams(),
        max_tokens=max_tokens,
        seed=0,
    )
    replicas.add_request(request)
    return request.replica


def run_until(replicas, condition):
    tokens = {}
    while not condition(tokens):
        for output in replicas.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def test_no_replica_waits_for_the_step_of_another(replicas, devices):
    slow, fast = add(replicas, "slow", 20), add(replicas, "fast", 20)
    assert {slow, fast} == {0, 1}
    devices[slow].is_busy = True
    tokens = run_until(replicas, lambda tokens: len(tokens.get("fast", ())) == 20)
    assert "slow" not in tokens
    # It is kept busy, with as many steps as are ever on a device, and no more are planned for it.
    assert devices[slow].num_steps <= 2
    devices[slow].is_busy = False
    tokens = run_until(replicas, lambda tokens: len(tokens.get("slow", ())) == 20)
    assert tokens == {"slow": [11] * 20}
    assert not replicas.has_work()


def test_all_busy_it_waits_and_can_be_asked_for_how_long(replicas, devices):
    add(replicas, "a", 4), add(replicas, "b", 4)
    for device in devices:
        device.is_busy = True
    while replicas.spare_s == 0:
        assert replicas.step() == []
    assert 0 < replicas.spare_s < 0.01
    waits = threading.Thread(target=replicas.step)
    waits.start()
    waits.join(0.05)
    assert waits.is_alive()
    devices[0].is_busy = False
    waits.join(60)
    assert not waits.is_alive()


def test_who_comes_to_a_waiting_replica_is_taken_at_once(replicas, devices):
    """Nothing can be planned while all that there is waits for the device; then somebody comes."""
    for name in ("a", "b"):
        add(replicas, name, 1)
    for device in devices:
        device.is_busy = True
    while replicas.spare_s == 0:
        replicas.step()
    before = [device.num_steps for device in devices]
    there = add(replicas, "c", 1)
    if replicas.spare_s == 0:
        replicas.step()
    overlaps = before[there] < devices[there].num_steps
    assert overlaps == EngineStats.total(replicas.call(GetStats())).overlap


def test_a_core_that_is_asked_often_plans_as_late_as_one_that_waits(devices):
    now, device = [0.0], devices[0]
    config = EngineConfig.create("model", max_model_len=256)
    core = EngineCore(config, device, clock=lambda: now[0])
    add(core, "a", 30)

    def step():
        """A step of 0.1 s on the device; when the next one was planned."""
        device.is_busy = True
        begin = now[0]
        while not core.is_due:
            now[0] += 0.001
        planned = now[0] - begin
        core.step(wait=False)
        now[0] = begin + 0.1
        assert not core.is_due
        device.is_busy = False
        core.step(wait=False)
        return planned

    core.step(wait=False)
    planned = [step() for _ in range(10)]
    # The first decode is planned at once, as nothing is known of those.
    assert planned[:2] == [0, 0]
    assert planned[2:] == pytest.approx([0.075] * 8, abs=0.002)


def test_all_begin_to_end_before_one_is_waited_for(replicas, devices, monkeypatch):
    begun = []
    for device in devices:
        monkeypatch.setattr(device, "begin_shutdown", lambda: begun.append("begins"), raising=False)
        monkeypatch.setattr(device, "shutdown", lambda: begun.append("ends"), raising=False)
    replicas.shutdown()
    assert begun == ["begins", "begins", "ends", "ends"]


def test_without_work_nothing_waits(replicas):
    assert replicas.step() == []
    assert not replicas.has_work()


def test_what_came_before_an_interrupt_is_not_lost(replicas, monkeypatch):
    def interrupted(wait):
        raise KeyboardInterrupt

    assert (add(replicas, "a", 1), add(replicas, "b", 1)) == (0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(replicas._cores[1], "step", interrupted)
        while not replicas._outputs:
            with pytest.raises(KeyboardInterrupt):
                replicas.step()
    assert replicas.has_work() and replicas.spare_s == 0
    tokens = run_until(replicas, lambda tokens: len(tokens) == 2)
    assert tokens == {"a": [11], "b": [11]}


def test_a_device_that_never_answers_shows_beside_one_that_does(replicas, devices):
    loop = BusyLoop(replicas, queue.SimpleQueue(), queue.SimpleQueue())
    assert loop.at_work() == [Work("its loop", 0)]
    first, second = add(replicas, "a", 4), add(replicas, "b", 200)
    devices[first].is_busy = True
    seen = []
    for _ in range(20):
        replicas.step()
        seen.append([work.number for work in loop.at_work()[:-1]])
    assert [work.name for work in loop.at_work()[:-1]] == [
        "the step of replica 0",
        "the step of replica 1",
    ]
    assert {numbers[first] for numbers in seen} == {0}
    assert len({numbers[second] for numbers in seen}) > 10
