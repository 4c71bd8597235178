"""The connections between rank 0 and the other ranks: authenticated, ordered, and watched.

Each side has three sockets. `steps` carries messages from rank 0, `reports` carries messages to it,
and `pulse` carries a beat every half second both ways, from a thread of its own. A rank that is
silent for too long is lost, and the engine with it. All messages are encrypted with keys that rank
0 makes at every start and broadcasts over the devices' own network.
"""

import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import zmq
import zmq.auth.thread
import zmq.utils.monitor

from jaxllm.errors import EngineDeadError
from jaxllm.logging import init_logger
from jaxllm.sockets import OneKey, end_context
from jaxllm.watch import AWAY_S

logger = init_logger(__name__)

_BEAT_S = 0.5
# Longer than a healthy process can keep its pulse thread from running.
_SILENCE_S = 15.0
# After a connection has broken, as when a process is killed.
_SILENCE_AFTER_BREAK_S = 4.0
# For the first beat: JAX may have to find the devices before.
_MEETING_S = 300.0
_LEADER = b"0"


class Invitation(msgspec.Struct):
    """What a rank needs to connect to rank 0. It contains secret keys."""

    address: str
    steps_port: int
    reports_port: int
    pulse_port: int
    server_key: bytes
    client_key: bytes
    client_secret: bytes

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "Invitation":
        return msgspec.msgpack.decode(data, type=cls)


class LeaderLink:
    """Rank 0's side. One thread at a time may use it."""

    def __init__(self, address: str, num_peers: int):
        self._peers = [_name(rank) for rank in range(1, num_peers + 1)]
        self._context = zmq.Context()
        server_key, server_secret = zmq.curve_keypair()
        client_key, client_secret = zmq.curve_keypair()
        self._doorman = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._doorman.start()
        self._doorman.configure_curve_callback("*", credentials_provider=OneKey(client_key))
        ports: list[int] = []
        sockets = []
        for kind in (zmq.ROUTER, zmq.PULL, zmq.ROUTER):
            one = self._context.socket(kind)
            _settle(one)
            if kind == zmq.ROUTER:
                one.setsockopt(zmq.ROUTER_MANDATORY, 1)
            one.curve_server = True
            one.curve_publickey, one.curve_secretkey = server_key, server_secret
            try:
                ports.append(one.bind_to_random_port(f"tcp://{address}"))
            except zmq.ZMQError as error:
                self._doorman.stop()
                raise EngineDeadError(
                    f"rank 0 cannot listen on {address} ({error}); --master-addr must be an "
                    "address of the host of rank 0"
                ) from error
            sockets.append(one)
        self._steps, self._reports, pulse = sockets
        self._pulse = _Pulse(pulse, self._peers)
        steps_port, reports_port, pulse_port = ports
        self.invitation = Invitation(
            address, steps_port, reports_port, pulse_port, server_key, client_key, client_secret
        )
        self._reason: str | None = None
        self._closed = False

    def await_peers(self) -> None:
        """Wait until every rank listens."""
        missing = set(self._peers)
        while missing:
            if self._steps.poll(_ms(_BEAT_S)):
                missing.discard(self._steps.recv_multipart()[0])
            self.check()

    def send(self, ranks: Collection[int], message: bytes) -> None:
        for rank in ranks:
            try:
                self._steps.send_multipart([_name(rank), message])
            except zmq.ZMQError as error:
                self.lose(f"rank {rank} cannot be reached: {error}")
                self.check()

    def receive(self, wait_s: float = 0.0) -> bytes | None:
        """Return the next report, or None after `wait_s`. Raise when a rank is lost."""
        while not self._reports.poll(_ms(min(wait_s, _BEAT_S))):
            self.check()
            wait_s -= _BEAT_S
            if wait_s <= 0:
                return None
        return self._reports.recv()

    def lose(self, reason: str) -> None:
        """Note why the engine is dead; the first reason counts."""
        self._reason = self._reason or reason

    def check(self) -> None:
        """Raise if a rank is lost."""
        if reason := self.reason:
            raise EngineDeadError(reason)

    @property
    def reason(self) -> str | None:
        """Why the engine is dead; None while it lives."""
        return self._reason or self._pulse.lost

    def close(self, last_word: bytes) -> None:
        """Send a last message to the ranks still there, and close the sockets."""
        if self._closed:
            return
        self._closed = True
        for name in self._peers:
            try:
                self._steps.send_multipart([name, last_word])
            except zmq.ZMQError:
                pass  # this rank is already gone
        self._pulse.stop()
        self._doorman.stop()
        self._steps.close(linger=1000)
        self._reports.close(linger=0)
        end_context(self._context)


class PeerLink:
    """The side of a rank other than 0. When rank 0 is lost, another thread calls `on_loss`: the
    thread that uses the link may wait for a device that never answers."""

    def __init__(self, invitation: Invitation, rank: int, on_loss: Callable[[str], None]):
        self._context = zmq.Context()
        sockets = []
        for kind, port in (
            (zmq.DEALER, invitation.steps_port),
            (zmq.PUSH, invitation.reports_port),
            (zmq.DEALER, invitation.pulse_port),
        ):
            one = self._context.socket(kind)
            _settle(one)
            one.setsockopt(zmq.IDENTITY, _name(rank))
            one.curve_serverkey = invitation.server_key
            one.curve_publickey, one.curve_secretkey = (
                invitation.client_key,
                invitation.client_secret,
            )
            one.connect(f"tcp://{invitation.address}:{port}")
            sockets.append(one)
        self._steps, self._reports, pulse = sockets
        self._sending = threading.Lock()
        self._is_closed = False
        self._steps.send(b"")
        self._pulse = _Pulse(pulse, [_LEADER], on_loss)

    def send(self, message: bytes) -> None:
        """Report to rank 0, from any thread. After the end nobody listens."""
        with self._sending:
            if not self._is_closed:
                self._reports.send(message)

    def receive(self) -> bytes:
        """Wait for the next message of rank 0."""
        return self._steps.recv()

    def close(self) -> None:
        self._pulse.stop()
        with self._sending:
            self._is_closed = True
            self._reports.close(linger=1000)
        self._steps.close(linger=0)
        end_context(self._context)


class _Pulse(threading.Thread):
    """Sends beats, and notices when another process is silent."""

    def __init__(
        self,
        beat: "zmq.Socket[bytes]",
        others: Collection[bytes],
        on_loss: Callable[[str], None] | None = None,
    ):
        super().__init__(name="pulse", daemon=True)
        self._socket = beat
        self._monitor = beat.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._is_leader = beat.type == zmq.ROUTER
        self._heard = dict.fromkeys(others, time.monotonic())
        self._met: set[bytes] = set()  # heard at least once
        self._on_loss = on_loss
        self._stopping = threading.Event()
        self.lost: str | None = None
        self.start()

    def stop(self) -> None:
        self._stopping.set()
        self.join()

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        next_beat = 0.0
        looked = time.monotonic()
        broken_at: float | None = None
        while not self._stopping.is_set() and self.lost is None:
            now = time.monotonic()
            if now - looked > AWAY_S:
                # This process was suspended, so it could not hear the others. If the machine slept,
                # its other processes did not run either.
                self._heard = dict.fromkeys(self._heard, now)
            looked = now
            if now >= next_beat:
                self._beat()
                next_beat = now + _BEAT_S
            for one, _ in poller.poll(_ms(_BEAT_S / 5)):
                if one is self._monitor:
                    zmq.utils.monitor.recv_monitor_message(self._monitor)
                    broken_at = now
                else:
                    *sender, _ = self._socket.recv_multipart()
                    name = sender[0] if sender else _LEADER
                    self._heard[name] = now
                    self._met.add(name)
            self._look(now, broken_at)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _beat(self) -> None:
        for name in self._heard:
            try:
                # NOBLOCK: a socket whose connection is gone would wait for a new one.
                frames = [name, b""] if self._is_leader else [b""]
                self._socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.ZMQError:
                pass  # not connected yet, or gone: `_look` notices its silence

    def _look(self, now: float, broken_at: float | None) -> None:
        for name, heard in self._heard.items():
            silence = now - heard
            is_broken = broken_at is not None and heard <= broken_at
            limit = _SILENCE_S if name in self._met else _MEETING_S
            if silence > (_SILENCE_AFTER_BREAK_S if is_broken else limit):
                self.lost = (
                    f"rank {name.decode()} is gone: its connection broke"
                    if is_broken
                    else f"rank {name.decode()} is silent for {silence:.0f} s"
                )
                if self._on_loss is not None:
                    self._on_loss(self.lost)
                return


def _settle(one: "zmq.Socket[Any]") -> None:
    """Remove the limits of the queues: the steps in flight bound the messages in flight."""
    one.setsockopt(zmq.SNDHWM, 0)
    one.setsockopt(zmq.RCVHWM, 0)


def _name(rank: int) -> bytes:
    return str(rank).encode()


def _ms(seconds: float) -> int:
    return max(0, int(seconds * 1000))
