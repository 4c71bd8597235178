"""Takes blocks from other engines, in a thread of its own.

It asks each of them for a few blocks at a time. A block that does not come in time is missing, and
so is all that is asked of an engine that says nothing for so long.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from jaxllm.handover.mailbox import Mailbox
from jaxllm.handover.secret import key_of_givers, key_of_takers
from jaxllm.handover.source import BlockSource
from jaxllm.handover.wire import FOREIGN, HERE, Wanted, digest
from jaxllm.logging import init_logger
from jaxllm.sockets import end_context

logger = init_logger(__name__)

_MOST_ASKED = 8  # blocks of one engine at a time
_IDLE_S = 60.0  # after which a connection is closed
_LOOK_S = 0.1

# Called in the taker's thread with a block's arrays as bytes, or with None: it does not come.
Taken = Callable[[list[Any] | None], None]


@dataclass(slots=True)
class _Giver:
    """The connection to an engine that gives."""

    socket: "zmq.Socket[bytes]"
    heard: float
    to_ask: deque[tuple[Wanted, Taken]] = field(default_factory=deque)
    # By key: when it was asked for, and who wants it.
    asked: dict[bytes, tuple[float, list[Taken]]] = field(default_factory=dict)


class Taker:
    """The connections to all engines that blocks are taken from."""

    def __init__(self, secret: bytes, identity: bytes, timeout: float):
        self._identity = identity
        self._timeout = timeout
        self._keys, self._server_key = key_of_takers(secret), key_of_givers(secret).public
        self._givers: dict[BlockSource, _Giver] = {}
        self._context = zmq.Context()
        # None ends the thread.
        self._questions: Mailbox[tuple[BlockSource, Wanted, Taken] | None] = Mailbox(self._context)
        self._thread = threading.Thread(target=self._run, name="kv-taker", daemon=True)
        self._thread.start()

    def ask(self, source: BlockSource, group: int, content: bytes, taken: Taken) -> None:
        """Ask for a block; `taken` is called once. Does not wait. Any thread may call this."""
        self._questions.put((source, Wanted(group, content), taken))

    def close(self) -> None:
        self._questions.put(None)
        self._thread.join()
        self._questions.close()
        end_context(self._context)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._questions.socket, zmq.POLLIN)
        while True:
            for giver in self._givers.values():
                self._send(giver)
            timeout = _LOOK_S if any(one.asked for one in self._givers.values()) else _IDLE_S
            ready = dict(poller.poll(int(1000 * timeout)))
            for source, giver in list(self._givers.items()):
                if giver.socket in ready:
                    self._receive(source, giver)
                reason = self._why_to_leave(giver)
                if not reason:
                    self._give_up(giver)
                else:
                    self._leave(source, reason)
                    poller.unregister(giver.socket)
            if self._questions.socket in ready:
                question = self._questions.take()
                if question is None:
                    break
                source, wanted, taken = question
                if source not in self._givers:
                    self._givers[source] = self._connect(source)
                    poller.register(self._givers[source].socket, zmq.POLLIN)
                self._givers[source].to_ask.append((wanted, taken))
        for source in list(self._givers):
            self._leave(source, "")

    def _connect(self, source: BlockSource) -> _Giver:
        one = self._context.socket(zmq.DEALER)
        one.curve_serverkey = self._server_key
        one.curve_publickey, one.curve_secretkey = self._keys
        one.setsockopt(zmq.LINGER, 0)
        one.setsockopt(zmq.IPV6, ":" in source.host)
        one.setsockopt(zmq.SNDHWM, 0)
        host = f"[{source.host}]" if ":" in source.host else source.host
        giver = _Giver(one, time.monotonic())
        try:
            one.connect(f"tcp://{host}:{source.port}")
        except zmq.ZMQError as error:
            logger.warning("no connection to %s: %s", source, error)
        return giver

    def _send(self, giver: _Giver) -> None:
        while giver.to_ask and len(giver.asked) < _MOST_ASKED:
            wanted, taken = giver.to_ask.popleft()
            key = wanted.encode()
            if key in giver.asked:
                giver.asked[key][1].append(taken)
                continue
            if not giver.asked:
                giver.heard = time.monotonic()
            giver.asked[key] = (time.monotonic(), [taken])
            with contextlib.suppress(zmq.ZMQError):  # then it is silent
                giver.socket.send_multipart([self._identity, key], zmq.NOBLOCK)

    def _receive(self, source: BlockSource, giver: _Giver) -> None:
        key, *rest = giver.socket.recv_multipart()
        status = rest.pop(0) if rest else b""
        giver.heard = time.monotonic()
        parts = None
        if status == HERE and rest:
            if digest(rest[1:]) == rest[0]:
                parts = rest[1:]
            else:
                logger.warning("a block of %s is damaged", source)
        elif status == FOREIGN:
            logger.warning(
                "%s runs another model, or another version of it or of jaxllm: prompts are "
                "computed here",
                source,
            )
        for taken in giver.asked.pop(key, (0.0, ()))[1]:
            taken(parts)

    def _give_up(self, giver: _Giver) -> None:
        """Let what was asked for too long ago be missing. The oldest is first."""
        limit = time.monotonic() - self._timeout
        while giver.asked and next(iter(giver.asked.values()))[0] < limit:
            for taken in giver.asked.pop(next(iter(giver.asked)))[1]:
                taken(None)

    def _why_to_leave(self, giver: _Giver) -> str:
        silence = time.monotonic() - giver.heard
        if giver.asked:
            return f"it is silent for {silence:.1f} s" if silence > self._timeout else ""
        return "it is not needed" if silence > _IDLE_S and not giver.to_ask else ""

    def _leave(self, source: BlockSource, reason: str) -> None:
        giver = self._givers.pop(source)
        giver.socket.close()
        lost = [taken for _, its in giver.asked.values() for taken in its]
        lost += [taken for _, taken in giver.to_ask]
        if lost and reason:
            logger.warning("%d blocks of %s do not come: %s", len(lost), source, reason)
        for taken in lost:
            taken(None)
