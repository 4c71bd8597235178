"""What rank 0 knows of steps that other ranks run, with it or alone, before it waits for them."""

import threading
import time

import numpy as np
import pytest

from jaxllm.cache_groups import CacheGroup
from jaxllm.errors import EngineDeadError
from jaxllm.executor.link import LeaderLink, PeerLink
from jaxllm.executor.multihost import MultiHostExecutor, _Inbox
from jaxllm.executor.wire import Failed, Figures, StepDone, Stop, encode
from jaxllm.messages import EngineInfo
from jaxllm.scheduler.schedule import Schedule, StepResult

INFO = EngineInfo(
    model="model",
    model_dir="",
    vocab_size=2,
    max_model_len=2,
    max_logprobs=0,
    eos_token_ids=[],
    max_num_seqs=1,
    max_num_batched_tokens=2,
    cache_groups=(CacheGroup(window=None, num_blocks=1, max_blocks_per_request=1),),
    block_size=2,
)
ONE = np.ones(1, np.int32)
SCHEDULE = Schedule(
    step=0,
    num_decodes=1,
    slots=ONE,
    num_tokens=ONE,
    context_lens=ONE,
    starts=ONE,
    samples=ONE > 0,
    token_ids=ONE,
    block_updates=np.zeros((0, 4), np.int32),
)


class WaitingDevice:
    """Runs a step that waits for the other rank's part of it."""

    def __init__(self):
        self.goes_on = threading.Event()

    def execute(self, schedule):
        return self

    def result(self):
        self.goes_on.wait()

    def free(self):
        self.goes_on.set()


@pytest.fixture
def peer_and_inbox():
    """Rank 1, and what rank 0 hears of it."""
    link = LeaderLink("127.0.0.1", 1)
    peer = PeerLink(link.invitation, 1, lambda reason: None)
    link.await_peers()
    yield peer, _Inbox(link)
    link.close(encode(Stop("")))
    peer.close()


@pytest.fixture
def peer_and_step(peer_and_inbox):
    """Rank 1, and a step of rank 0 that waits for it."""
    peer, inbox = peer_and_inbox
    executor = MultiHostExecutor(inbox, 0, [0, 1], INFO, WaitingDevice())
    yield peer, executor.execute(SCHEDULE)
    executor.shutdown()


def becomes_ready(step):
    until = time.monotonic() + 60
    while not step.is_ready() and time.monotonic() < until:
        time.sleep(0.01)
    return step.is_ready()


def test_a_step_is_not_ready_while_the_others_live(peer_and_step):
    _, step = peer_and_step
    assert not step.is_ready()


def test_nothing_is_put_off_when_a_rank_has_failed(peer_and_step):
    peer, step = peer_and_step
    peer.send(encode(Failed(1, "out of memory")))
    assert becomes_ready(step)
    with pytest.raises(EngineDeadError, match="rank 1: out of memory"):
        step.result()


def test_nothing_is_put_off_when_a_rank_is_gone(peer_and_step):
    peer, step = peer_and_step
    peer.close()
    assert becomes_ready(step)
    with pytest.raises(EngineDeadError, match="rank 1 is gone"):
        step.result()


def test_an_engine_without_a_step_learns_that_a_rank_has_failed(peer_and_inbox):
    peer, inbox = peer_and_inbox
    executor = MultiHostExecutor(inbox, 0, [1], INFO, None)
    executor.check()
    peer.send(encode(Failed(1, "out of memory")))
    until = time.monotonic() + 60
    with pytest.raises(EngineDeadError, match="rank 1: out of memory"):
        while time.monotonic() < until:
            executor.check()
            time.sleep(0.01)


def test_a_step_of_another_rank_alone_is_ready_when_its_result_is_there(peer_and_inbox):
    peer, inbox = peer_and_inbox
    steps = [
        MultiHostExecutor(inbox, replica, [1], INFO, None).execute(SCHEDULE) for replica in (1, 2)
    ]
    assert not any(step.is_ready() for step in steps)
    result = StepResult(ONE, None)
    peer.send(encode(StepDone(replica=2, result=result, figures=Figures())))
    assert becomes_ready(steps[1])
    assert not steps[0].is_ready()
    assert steps[1].result().token_ids.tolist() == [1]
