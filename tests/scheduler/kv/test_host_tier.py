"""What moves in one step, and what comes from other engines."""

import numpy as np
import pytest

from jaxllm.handover.source import BlockSource
from jaxllm.scheduler.kv.host_tier import HostTier
from tests.scheduler.fake_mover import FakeMover

X, Y, SOURCE = b"x" * 32, b"y" * 32, BlockSource("127.0.0.1", 1)


@pytest.fixture
def tier():
    mover = FakeMover([np.zeros(8)], has_files=False)
    mover.is_prompt = True
    return HostTier([8], mover)


def stored(tier):
    moves = tier.take_moves()
    return [] if moves is None else moves.contents


def test_a_block_is_not_stored_while_it_is_filled(tier):
    """Stores are read before loads are written: it would be stored as what it held before."""
    tier.load(0, 3, block=5)
    tier.offer(0, 5, X)
    tier.offer(0, 6, Y)
    assert stored(tier) == [Y]
    tier.offer(0, 5, X)
    assert stored(tier) == [X]


def test_what_is_forgotten_does_not_move(tier):
    tier.offer(0, 1, X)
    assert tier.ask(0, Y, SOURCE)
    for content in (X, Y):
        tier.forget(0, content)
    assert tier.take_moves() is None
    # Their places are free, and no two contents have one.
    assert tier.ask(0, b"z" * 32, SOURCE)
    (take,) = tier.take_moves().takes
    assert take[2] == b"z" * 32
    tier.check()


def test_only_who_has_asked_waits_for_another_engine(tier):
    assert tier.ask(0, X, SOURCE) and tier.is_coming(0, X)
    assert not tier.has(0, X)
    tier.offer(0, 1, Y)
    assert tier.has(0, Y)


def test_what_comes_from_another_engine_takes_no_room_of_others(tier):
    contents = [bytes([index]) * 32 for index in range(6)]
    assert [tier.ask(0, one, SOURCE) for one in contents] == [True] * 2 + [False] * 4
    for block, content in enumerate(contents[2:]):
        tier.offer(0, block, content)
    assert stored(tier) == contents[2:4]
    tier.check()
