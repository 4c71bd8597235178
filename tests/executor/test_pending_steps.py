"""What rank 0 knows of steps that other ranks run, with it or alone, before it waits for them."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from jaxllm.errors import EngineDeadError
from jaxllm.executor.link import LeaderLink, PeerLink
from jaxllm.executor.multihost import MultiHostExecutor, _Inbox
from jaxllm.executor.wire import (
    Arrived,
    Execute,
    Failed,
    Figures,
    FilesChanged,
    ForgetBlock,
    ForgetBlocks,
    Move,
    Ready,
    Sample,
    StepDone,
    Stop,
    decode_from_leader,
    encode,
)
from jaxllm.scheduler.schedule import Arrival, BlockMoves, LateMasks, Schedule, StepResult
from tests.stand_in import INFO, TOKEN, StandIn

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
    goes_on = threading.Event()
    device = StandIn(on_result=lambda schedule: goes_on.wait())
    executor = MultiHostExecutor(inbox, 0, [0, 1], INFO, device)
    yield peer, executor.execute(SCHEDULE)
    goes_on.set()
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


def test_late_rows_are_sampled_everywhere_before_the_step_is_read(peer_and_inbox):
    peer, inbox = peer_and_inbox
    asked, read = [], []

    class Device(StandIn):
        def sample(self, masks):
            asked.append(masks.first.tolist())

    device = Device(on_result=lambda schedule: read.append(len(asked)))
    executor = MultiHostExecutor(inbox, 0, [0, 1], INFO, device)
    masks = LateMasks(np.array([[-1, 3]], np.int32))
    step = executor.execute(dataclasses.replace(SCHEDULE, late_rows=np.zeros(1, np.int32)))
    assert not step.is_ready() and not read
    executor.sample(masks)
    assert becomes_ready(step) and step.result().token_ids.tolist() == [TOKEN]
    assert (asked, read) == ([[[-1, 3]]], [1])
    execute, sample = (decode_from_leader(peer.receive()) for _ in range(2))
    assert isinstance(execute, Execute) and execute.schedule.late_rows.tolist() == [0]
    assert isinstance(sample, Sample) and sample.masks.first.tolist() == [[-1, 3]]
    executor.shutdown()


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


def test_a_rank_that_runs_alone_says_what_has_arrived_and_which_files_it_has(peer_and_inbox):
    peer, inbox = peer_and_inbox
    mover = MultiHostExecutor(inbox, 0, [1], INFO, None).mover()
    peer.send(encode(Ready(1, {}, {0: [(0, b"one")], 1: [(0, b"of another replica")]})))
    inbox.await_message(Ready)
    assert mover.is_stored(0, b"one") and not mover.is_stored(1, b"one")
    assert not mover.is_stored(0, b"of another replica")
    stores, none = np.array([[0, 1, 2]], np.int32), np.zeros((0, 3), np.int32)
    reads = [(0, 3, b"one")]
    mover.send(BlockMoves(number=3, stores=stores, contents=[b"two"], loads=none, reads=reads))
    message = decode_from_leader(peer.receive())
    assert isinstance(message, Move) and message.moves.number == 3
    assert not list(mover.arrived())
    peer.send(encode(FilesChanged(1, 0, gained=[(0, b"two")], lost=[(0, b"one")])))
    peer.send(encode(Arrived(1, 0, 3, failed=[(0, b"one")])))
    until, found = time.monotonic() + 60, []
    while not found and time.monotonic() < until:
        found = list(mover.arrived(wait=True))
    assert found == [Arrival(3, 0, b"two", True), Arrival(3, 0, b"one", False)]
    assert mover.is_stored(0, b"two") and not mover.is_stored(0, b"one")


def test_what_is_forgotten_is_forgotten_on_all_ranks(peer_and_inbox):
    peer, inbox = peer_and_inbox
    mover = MultiHostExecutor(inbox, 2, [1], INFO, None).mover()
    peer.send(encode(Ready(1, {}, {2: [(0, b"one"), (0, b"two")]})))
    inbox.await_message(Ready)
    mover.forget(0, b"one")
    assert mover.is_stored(0, b"two") and not mover.is_stored(0, b"one")
    mover.forget_all()
    assert not mover.is_stored(0, b"two")
    messages = [decode_from_leader(peer.receive()) for _ in range(2)]
    assert messages == [ForgetBlock(2, 0, b"one"), ForgetBlocks(2)]


def test_a_load_awaits_a_block_of_a_step_on_all_ranks(peer_and_inbox):
    """Rank 0 has copied its part, and does not count on it before rank 1 has."""
    peer, inbox = peer_and_inbox

    class Device(StandIn):
        def mover(self):
            return self

        def follow(self, tell):
            self.tell = tell

    device = Device()
    executor = MultiHostExecutor(inbox, 0, [0, 1], INFO, device)
    mover = executor.mover()
    stores, none = np.array([[0, 1, 2]], np.int32), np.zeros((0, 3), np.int32)
    moves = BlockMoves(number=5, stores=stores, contents=[b"one"], loads=none, reads=[])
    executor.execute(dataclasses.replace(SCHEDULE, moves=moves))
    device.tell([Arrival(5, 0, b"one", True)])
    assert not list(mover.arrived(wait=True))
    peer.send(encode(Arrived(1, 0, 5, failed=[])))
    until, found = time.monotonic() + 60, []
    while not found and time.monotonic() < until:
        found = list(mover.arrived(wait=True))
    assert found == [Arrival(5, 0, b"one", True)]
    executor.shutdown()
