"""For how long work was there and the device had none."""

import pytest

from jaxllm import SamplingParams
from jaxllm.config import EngineConfig
from jaxllm.engine.commands import Sleep, WakeUp
from jaxllm.engine.core import EngineCore
from jaxllm.messages import EngineRequest
from tests.stand_in import StandIn


@pytest.fixture(params=["overlap", "plain"])
def core_at_work(request):
    """An engine core in the midst of a request, and its clock."""
    now = [0.0]
    config = EngineConfig.create("model", async_scheduling=request.param == "overlap")
    core = EngineCore(config, StandIn(), clock=lambda: now[0])
    add(core, "first")
    core.step()
    core.step()
    return core, now


def add(core, request_id):
    core.add_request(
        EngineRequest(
            request_id=request_id,
            prompt_token_ids=[1, 2],
            sampling_params=SamplingParams(),
            max_tokens=50,
            seed=0,
        )
    )


def drain(core):
    while core.has_work():
        core.step()


def test_a_host_that_lets_the_device_wait_is_counted(core_at_work):
    core, now = core_at_work
    while core.in_flight:
        core._collect()
    now[0] += 3.0
    core.step()
    assert core.stats().device_idle_s == 3.0


def test_time_after_the_last_request_was_aborted_is_not(core_at_work):
    core, now = core_at_work
    core.abort_requests(["first"])
    drain(core)
    now[0] += 3600.0
    add(core, "second")
    drain(core)
    assert core.stats().device_idle_s == 0


def test_time_after_the_last_request_has_ended_is_not(core_at_work):
    core, now = core_at_work
    drain(core)
    now[0] += 3600.0
    add(core, "second")
    drain(core)
    assert core.stats().device_idle_s == 0


@pytest.mark.parametrize("level", [0, 1])
def test_sleep_is_not(core_at_work, level):
    core, now = core_at_work
    core.call(Sleep(level))
    now[0] += 3600.0
    core.call(WakeUp())
    drain(core)
    assert core.stats().device_idle_s == 0


def test_figures_that_were_handed_out_do_not_change(core_at_work):
    core, _ = core_at_work
    before = core.stats()
    num_steps, sizes = before.num_steps, list(before.step_sizes)
    drain(core)
    assert core.stats().num_steps > num_steps == before.num_steps
    assert before.step_sizes == sizes
