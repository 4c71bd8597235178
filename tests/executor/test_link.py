"""The wires between ranks let in who was invited, keep the order, and notice who is gone."""

import contextlib
import threading
import time

import pytest
import zmq

from jaxllm import sockets
from jaxllm.errors import EngineDeadError
from jaxllm.executor import link
from jaxllm.executor.link import LeaderLink, PeerLink


@pytest.fixture
def leader():
    leader = LeaderLink("127.0.0.1", 2)
    yield leader
    leader.close(b"end")


def test_messages_arrive_in_order_at_those_they_are_for(leader):
    peers = [PeerLink(leader.invitation, rank, pytest.fail) for rank in (1, 2)]
    leader.await_peers()
    for number in range(100):
        leader.send([1, 2] if number % 2 else [2], b"%d" % number)
    assert [peers[1].receive() for _ in range(100)] == [b"%d" % n for n in range(100)]
    assert [peers[0].receive() for _ in range(50)] == [b"%d" % n for n in range(1, 100, 2)]
    assert leader.receive() is None
    peers[0].send(b"one")
    assert leader.receive(200) == b"one"
    for peer in peers:
        peer.close()


def test_an_end_that_hangs_is_left_behind(monkeypatch, caplog):
    monkeypatch.setattr(sockets, "_END_S", 0.2)
    leader = LeaderLink("127.0.0.1", 2)
    open_socket = leader._context.socket(zmq.PUSH)  # the context waits until it is closed
    leader.close(b"end")
    assert "did not end in 0.2 s" in caplog.text
    open_socket.close(linger=0)


def test_who_has_no_key_is_not_let_in(leader):
    stranger = zmq.Context.instance().socket(zmq.PUSH)
    stranger.curve_serverkey = leader.invitation.server_key
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    stranger.connect(f"tcp://{leader.invitation.address}:{leader.invitation.reports_port}")
    with contextlib.suppress(zmq.Again):  # sent away before there was anything to say
        stranger.send(b"let me in", zmq.DONTWAIT)
    guest = PeerLink(leader.invitation, 2, pytest.fail)
    guest.send(b"hello")
    assert leader.receive(200) == b"hello"
    assert leader.receive(1) is None
    stranger.close(linger=0)
    guest.close()


def test_who_hangs_up_is_missed(leader):
    peers = [PeerLink(leader.invitation, rank, pytest.fail) for rank in (1, 2)]
    leader.await_peers()
    peers[1].close()
    with pytest.raises(EngineDeadError, match="rank 2 is gone: its connection broke"):
        while True:
            leader.receive(1)
    assert leader.reason == "rank 2 is gone: its connection broke"
    peers[0].close()


class ClockOfAMachine:
    """Goes on while the machine sleeps."""

    slept_s = 0.0

    def monotonic(self):
        return time.monotonic() + self.slept_s


def test_nobody_is_missed_when_the_machine_has_slept(leader, monkeypatch):
    clock, beats = ClockOfAMachine(), threading.Semaphore(0)
    monkeypatch.setattr(link, "time", clock)
    beat = link._Pulse._beat
    monkeypatch.setattr(link._Pulse, "_beat", lambda self: (beat(self), beats.release()))
    peers = [PeerLink(leader.invitation, rank, pytest.fail) for rank in (1, 2)]
    leader.await_peers()
    for slept_s in (0.0, 3600.0):
        clock.slept_s = slept_s
        for _ in range(12):  # by three links
            assert beats.acquire(timeout=60)
    assert leader.receive() is None
    assert leader.reason is None
    for peer in peers:
        peer.close()


def test_a_leader_that_hangs_up_is_missed():
    leader, lost = LeaderLink("127.0.0.1", 1), threading.Event()
    peer = PeerLink(leader.invitation, 1, lambda reason: lost.set())
    leader.await_peers()
    leader.close(b"end")
    assert peer.receive() == b"end"
    assert lost.wait(60)
    peer.close()


def test_an_address_of_another_host_is_refused():
    with pytest.raises(EngineDeadError, match="must be an address of the host of rank 0"):
        LeaderLink("203.0.113.1", 1)
