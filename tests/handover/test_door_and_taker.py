"""Blocks go from one end to the other, or are missing in time: nobody waits for ever."""

import contextlib
import queue
import threading

import pytest
import zmq

from jaxllm.errors import ValidationError
from jaxllm.handover import door as door_module
from jaxllm.handover import taker as taker_module
from jaxllm.handover.door import Door
from jaxllm.handover.secret import key_of_givers
from jaxllm.handover.source import BlockSource
from jaxllm.handover.taker import Taker

SECRET, IDENTITY = b"known to few of us", b"i" * 32


def content(index):
    return bytes([index]) * 32


def block(index):
    return [bytes([index]) * 1000, b"", bytes([index + 1]) * 77]


class Blocks:
    """What an engine has; some of it comes late."""

    def __init__(self, indices=()):
        self.its = {(1, content(index)): block(index) for index in indices}
        self.num_asked = 0
        self.comes_at = None  # the look-up before which block 5 comes

    def look_up(self, group, name, answer):
        self.num_asked += 1
        if self.num_asked == self.comes_at:
            self.its[1, content(5)] = block(5)
        threading.Thread(target=answer, args=(self.its.get((group, name)),)).start()


@contextlib.contextmanager
def ends(blocks, *, secret=SECRET, identity=IDENTITY, timeout=200.0):
    door = Door("127.0.0.1", 0, SECRET, IDENTITY, blocks.look_up)
    taker = Taker(secret, identity, timeout)
    try:
        yield door, taker
    finally:
        taker.close()
        door.close()


def ask(taker, source, indices, group=1):
    answers = queue.Queue()
    for index in indices:
        taker.ask(source, group, content(index), lambda its, i=index: answers.put((i, its)))
    return dict(answers.get(timeout=200) for _ in indices)


def test_all_blocks_come_whole():
    with ends(Blocks(range(100))) as (door, taker):
        assert ask(taker, door.source, range(100)) == {i: block(i) for i in range(100)}
        assert ask(taker, door.source, [3, 3, 3]) == {3: block(3)}


def test_what_is_not_there_is_missing_after_a_while():
    blocks = Blocks([1])
    with ends(blocks) as (door, taker):
        assert ask(taker, door.source, [1, 2]) == {1: block(1), 2: None}
        assert ask(taker, door.source, [1], group=0) == {1: None}


def test_what_comes_late_is_waited_for(monkeypatch):
    monkeypatch.setattr(door_module, "_PATIENCE_S", 200.0)
    blocks = Blocks()
    blocks.comes_at = 8  # it is looked up again and again
    with ends(blocks) as (door, taker):
        assert ask(taker, door.source, [5]) == {5: block(5)}
    assert blocks.num_asked == 8


def test_other_models_get_nothing():
    blocks = Blocks([1])
    with ends(blocks, identity=b"o" * 32) as (door, taker):
        assert ask(taker, door.source, [1]) == {1: None}
        assert blocks.num_asked == 0


def test_nobody_gets_anything_without_the_secret(monkeypatch):
    blocks = Blocks([1])
    with ends(blocks, secret=b"another one to guess", timeout=0.5) as (door, taker):
        assert ask(taker, door.source, range(20)) == dict.fromkeys(range(20))
    # Nor who knows the public key of the giver alone.
    giver = key_of_givers(SECRET)
    monkeypatch.setattr(taker_module, "key_of_givers", lambda secret: giver)
    with ends(blocks, secret=b"another one to guess", timeout=0.5) as (door, taker):
        assert ask(taker, door.source, range(20)) == dict.fromkeys(range(20))
    assert blocks.num_asked == 0


def test_a_missing_block_is_told_of_while_others_are_asked_for():
    with ends(Blocks([1])) as (door, taker):
        told, busy = queue.Queue(), threading.Event()

        def go_on(its):
            if not busy.is_set():
                taker.ask(door.source, 1, content(1), go_on)

        go_on(None)
        taker.ask(door.source, 1, content(2), told.put)
        assert told.get(timeout=60) is None  # by the door: the taker would wait longer
        busy.set()


def test_a_block_that_never_comes_is_given_up_while_others_come():
    def look_up(group, name, answer):
        if name != content(2):
            answer(block(1))

    door, taker = Door("127.0.0.1", 0, SECRET, IDENTITY, look_up), Taker(SECRET, IDENTITY, 0.3)
    told, busy = queue.Queue(), threading.Event()

    def go_on(its):
        if not busy.is_set():
            taker.ask(door.source, 1, content(1), go_on)

    go_on(None)
    taker.ask(door.source, 1, content(2), told.put)
    assert told.get(timeout=200) is None
    busy.set()
    taker.close()
    door.close()


def test_where_nobody_is_nothing_comes():
    with ends(Blocks([1]), timeout=0.3) as (door, taker):
        for nowhere in (BlockSource("127.0.0.1", 9), BlockSource("no such host\0", 1)):
            assert ask(taker, nowhere, [1]) == {1: None}
        taker._timeout = 200.0
        assert ask(taker, door.source, [1]) == {1: block(1)}


def test_a_damaged_block_does_not_count(monkeypatch):
    monkeypatch.setattr(door_module, "digest", lambda parts: b"x" * 32)
    with ends(Blocks([1])) as (door, taker):
        assert ask(taker, door.source, [1]) == {1: None}


def test_questions_of_another_form_change_nothing():
    with ends(Blocks([1])) as (door, taker):
        keys = door_module.key_of_takers(SECRET)
        with zmq.Context() as context, context.socket(zmq.DEALER) as one:
            one.curve_serverkey = door_module.key_of_givers(SECRET).public
            one.curve_publickey, one.curve_secretkey = keys
            one.connect(f"tcp://{door.source}")
            for frames in ([b""], [b"a", b"b"], [IDENTITY, b"x" * 36, b""], [IDENTITY] * 5):
                one.send_multipart(frames)
            assert not one.poll(200)
            one.setsockopt(zmq.LINGER, 0)
        assert ask(taker, door.source, [1]) == {1: block(1)}


def test_an_address_of_others_is_refused():
    with pytest.raises(ValidationError, match="kv_ip"):
        Door("192.0.2.1", 0, SECRET, IDENTITY, Blocks().look_up)


def test_what_was_asked_is_missing_when_it_closes():
    answers = queue.Queue()
    door = Door("127.0.0.1", 0, SECRET, IDENTITY, lambda *_: None)  # never answers
    taker = Taker(SECRET, IDENTITY, 600)
    for index in range(30):
        taker.ask(door.source, 1, content(index), answers.put)
    taker.close()
    door.close()
    assert [answers.get_nowait() for _ in range(30)] == [None] * 30
