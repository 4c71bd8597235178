"""What the loop does first when several things could be done."""

import queue
import threading

import pytest

from jaxllm.engine.busy_loop import EVERYBODY, BusyLoop, Letter
from jaxllm.messages import Add, EngineRequest, Stop
from jaxllm.sampling_params import SamplingParams


class EngineAtWork:
    """Has a step on its device until a second request comes."""

    def __init__(self, then):
        self.done = []
        self._then = then

    def has_work(self):
        return True

    @property
    def spare_s(self):
        self._then(self)
        return 0.0 if len(self.done) == 2 else 60.0

    def add_request(self, request):
        self.done.append(request.request_id)

    def step(self):
        self.done.append("step")
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


@pytest.fixture
def inbox():
    return queue.SimpleQueue()


def test_who_comes_while_there_is_time_is_in_the_next_step(inbox):
    """Each comes only when the loop asks how long it may wait, so it has to wait for them."""

    def next_one_comes(engine):
        number = len(engine.done)
        later = letter(str(number)) if number < 2 else Letter(EVERYBODY, Stop())
        threading.Timer(0.05, inbox.put, [later]).start()

    engine = EngineAtWork(next_one_comes)
    BusyLoop(engine, inbox, queue.SimpleQueue()).run()
    assert engine.done[:3] == ["0", "1", "step"]
