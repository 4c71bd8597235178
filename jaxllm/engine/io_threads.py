"""The two threads between an engine's queues and its sockets: one reads and decodes, one encodes
and sends. The id of a request begins with its frontend's name, so outputs find their frontend."""

import threading
from typing import Any

import msgspec
import zmq

from jaxllm.engine.busy_loop import EVERYBODY, Inbox, Letter, Outbox
from jaxllm.logging import init_logger
from jaxllm.messages import OWNER_MARK, Dead, EngineOutput, Outputs, ToEngine

logger = init_logger(__name__)

_GREETING_TIMEOUT_MS = 10_000
# A frontend that starts with the engine connects only after it has read its tokenizer.
_FAREWELL_TIMEOUT_MS = 60_000


class InputThread(threading.Thread):
    """Reads the messages of frontends."""

    def __init__(self, socket: "zmq.Socket[bytes]", inbox: Inbox):
        super().__init__(name="input", daemon=True)
        self._socket = socket
        self._inbox = inbox
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def run(self) -> None:
        while True:
            try:
                client, data = self._socket.recv_multipart()
            except zmq.ContextTerminated:
                self._socket.close(linger=0)
                return
            try:
                message = self._decoder.decode(data)
            except msgspec.MsgspecError as error:
                logger.error("a message of %r is none: %s", client, error)
                continue
            self._inbox.put(Letter(client, message))


class OutputThread(threading.Thread):
    """Sends the engine's messages until the outbox brings None."""

    def __init__(self, socket: "zmq.Socket[bytes]", outbox: Outbox):
        super().__init__(name="output", daemon=True)
        self._socket = socket
        self._outbox = outbox
        self._encoder = msgspec.msgpack.Encoder()
        self._greeted: set[bytes] = set()  # frontends that listen

    def run(self) -> None:
        while (item := self._outbox.get()) is not None:
            if isinstance(item, Letter):
                self._send_letter(item)
            else:
                self._send_outputs(item)
        self._socket.close(linger=4000)

    def _send_letter(self, letter: Letter) -> None:
        if letter.client == EVERYBODY:
            # A Dead message waits until a frontend listens. Frontends that have just connected get
            # the message too.
            is_last = isinstance(letter.message, Dead)
            while self._socket.poll(_FAREWELL_TIMEOUT_MS if is_last and not self._greeted else 0):
                self._greeted.add(self._socket.recv_multipart()[0])
            for client in self._greeted:
                self._send(client, letter.message)
            return
        while letter.client not in self._greeted:
            if not self._socket.poll(_GREETING_TIMEOUT_MS):
                logger.error("frontend %r does not listen", letter.client)
                return
            self._greeted.add(self._socket.recv_multipart()[0])
        self._send(letter.client, letter.message)

    def _send_outputs(self, outputs: list[EngineOutput]) -> None:
        by_client: dict[str, list[EngineOutput]] = {}
        for output in outputs:
            client = output.request_id.partition(OWNER_MARK)[0]
            by_client.setdefault(client, []).append(output)
        for client, its in by_client.items():
            self._send(client.encode(), Outputs(its))

    def _send(self, client: bytes, message: Any) -> None:
        self._socket.send_multipart([client, self._encoder.encode(message)])
