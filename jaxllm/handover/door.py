"""Gives blocks to other engines, in a thread of its own."""

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import zmq
import zmq.auth.thread

from jaxllm.errors import refused
from jaxllm.handover.mailbox import Mailbox
from jaxllm.handover.secret import key_of_givers, key_of_takers
from jaxllm.handover.source import BlockSource
from jaxllm.handover.wire import FOREIGN, HERE, MISSING, Wanted, digest
from jaxllm.logging import init_logger
from jaxllm.sockets import OneKey, end_context

logger = init_logger(__name__)

# How long a block is waited for that is not there. It may be on its way from the devices, whose
# last step may just have been answered.
_PATIENCE_S = 0.25
_AGAIN_S = 0.02
_LONGEST_QUESTION = 1024

Answer = Callable[[list[bytes] | None], None]
LookUp = Callable[[int, bytes, Answer], None]


class _Question(NamedTuple):
    taker: bytes
    wanted: Wanted
    until: float  # when it is answered, whether the block has come or not


class Door:
    """Answers other engines that have the secret."""

    def __init__(self, host: str, port: int, secret: bytes, identity: bytes, look_up: LookUp):
        """`look_up` calls back, from any thread, with copies of a block's arrays, or with None."""
        self._identity = identity
        self._look_up = look_up
        self._again: list[_Question] = []
        self._context = zmq.Context()
        # From the thread that looks up; None ends this one.
        self._found: Mailbox[tuple[_Question, list[bytes] | None] | None] = Mailbox(self._context)
        self._doorman = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._doorman.start()
        takers = OneKey(key_of_takers(secret).public)
        self._doorman.configure_curve_callback("*", credentials_provider=takers)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = key_of_givers(secret)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _LONGEST_QUESTION)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        try:
            self._socket.bind(f"tcp://{_bracketed(host)}:{port or '*'}")
        except zmq.ZMQError as error:
            self._close()
            why = f"{error}; kv_ip must be an address of this host, and the port free"
            raise refused("kv_ip", f"{host}:{port}", why) from error
        taken = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.source = BlockSource(host, int(taken.rpartition(":")[2]))
        self._thread = threading.Thread(target=self._run, name="kv-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._found.put(None)
        self._thread.join()
        self._close()

    def _close(self) -> None:
        self._socket.close()
        self._found.close()
        self._doorman.stop()
        end_context(self._context)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._found.socket, zmq.POLLIN)
        again_at = 0.0
        while True:
            ready = dict(poller.poll(int(1000 * _AGAIN_S) if self._again else None))
            if self._socket in ready:
                self._take(self._socket.recv_multipart())
            if self._found.socket in ready:
                found = self._found.take()
                if found is None:
                    return
                self._answer(*found)
            if self._again and time.monotonic() >= again_at:
                again_at = time.monotonic() + _AGAIN_S
                again, self._again = self._again, []
                for question in again:
                    self._ask(question)

    def _take(self, frames: list[bytes]) -> None:
        taker, *rest = frames
        wanted = Wanted.decode(rest[1]) if len(rest) == 2 else None
        if wanted is None:
            return  # it is of no engine of ours
        if rest[0] != self._identity:
            self._send([taker, wanted.encode(), FOREIGN])
            return
        self._ask(_Question(taker, wanted, time.monotonic() + _PATIENCE_S))

    def _ask(self, question: _Question) -> None:
        self._look_up(*question.wanted, lambda parts: self._found.put((question, parts)))

    def _answer(self, question: _Question, parts: list[bytes] | None) -> None:
        taker, key = question.taker, question.wanted.encode()
        if parts is not None:
            self._send([taker, key, HERE, digest(parts), *parts])
        elif time.monotonic() < question.until:
            self._again.append(question)
        else:
            self._send([taker, key, MISSING])

    def _send(self, frames: list[Any]) -> None:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            logger.warning("a block cannot be sent: %s", error)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
