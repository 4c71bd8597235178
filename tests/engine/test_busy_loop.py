"""What the loop does first when several things could be done, and when it ends."""

import queue
import threading

import pytest

from jaxllm.engine import busy_loop
from jaxllm.engine.busy_loop import EVERYBODY, BusyLoop, Letter
from jaxllm.errors import EngineDeadError
from jaxllm.messages import Add, EngineOutput, EngineRequest, FinishReason, Stop
from jaxllm.sampling_params import SamplingParams


class EngineAtWork:
    """Has time to spare until a second request comes; each comes when it is asked for that."""

    def __init__(self, inbox):
        self.done = []
        self._inbox = inbox
        self._num_sent = 0

    def has_work(self):
        return True

    @property
    def spare_s(self):
        if len(self.done) == 2:
            return 0.0
        if self._num_sent == len(self.done):
            threading.Timer(0.02, self._inbox.put, [letter(str(self._num_sent))]).start()
            self._num_sent += 1
        return 60.0

    def add_request(self, request):
        self.done.append(request.request_id)

    def step(self):
        self.done.append("step")
        self._inbox.put(Letter(EVERYBODY, Stop()))
        return []


def letter(request_id):
    request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=[1],
        max_tokens=1,
        seed=0,
        sampling_params=SamplingParams(),
    )
    return Letter(b"client", Add(request))


def test_who_comes_while_there_is_time_is_in_the_next_step():
    inbox = queue.SimpleQueue()
    engine = EngineAtWork(inbox)
    BusyLoop(engine, inbox, queue.SimpleQueue()).run()
    assert engine.done == ["0", "1", "step"]


def test_a_step_is_made_at_once_when_there_is_no_time():
    inbox = queue.SimpleQueue()
    engine = EngineAtWork(inbox)
    engine.done = ["0", "1"]
    BusyLoop(engine, inbox, queue.SimpleQueue()).run()
    assert engine.done == ["0", "1", "step"]


class EngineThatDies:
    """Has as many steps to do as it is given, and lives for some looks after them."""

    def __init__(self, *, num_steps, num_looks):
        self._num_steps = num_steps
        self._num_looks = num_looks
        self.spare_s = 0.0

    def has_work(self):
        return self._num_steps > 0

    def step(self):
        self._num_steps -= 1
        return [EngineOutput(request_id="0", finish_reason=FinishReason.ERROR, error="it is gone")]

    def check(self):
        if not self._num_looks:
            raise EngineDeadError("it is gone")
        self._num_looks -= 1


@pytest.mark.parametrize(("num_steps", "num_looks"), [(1, 0), (0, 2)], ids=["at work", "idle"])
def test_an_engine_that_has_died_ends_the_loop_although_nobody_asks(
    num_steps, num_looks, monkeypatch
):
    monkeypatch.setattr(busy_loop, "_CHECK_S", 0.01)
    inbox, outbox, ends = queue.SimpleQueue(), queue.SimpleQueue(), queue.SimpleQueue()
    engine = EngineThatDies(num_steps=num_steps, num_looks=num_looks)

    def run():
        with pytest.raises(EngineDeadError, match="it is gone"):
            BusyLoop(engine, inbox, outbox).run()
        ends.put("died")

    threading.Thread(target=run, daemon=True).start()
    assert ends.get(timeout=200) == "died"
    assert outbox.qsize() == num_steps
