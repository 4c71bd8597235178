"""What the loop does first when several things could be done."""

import queue
import threading

from jaxllm.engine.busy_loop import EVERYBODY, BusyLoop, Letter
from jaxllm.messages import Add, EngineRequest, Stop
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
