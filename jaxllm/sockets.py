"""What all users of ZeroMQ's sockets share: which keys may connect, and how a context ends."""

import threading
from typing import Any

import zmq

from jaxllm.logging import init_logger

logger = init_logger(__name__)

# For the last messages to be sent.
_END_S = 10.0


class OneKey:
    """Lets clients in that have this key."""

    def __init__(self, key: bytes):
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


def end_context(context: "zmq.Context[Any]") -> None:
    """End a context whose sockets are closed. Under load libzmq once waited for ever for its own
    threads, and an engine that ends must not hang, so its process leaves them behind."""
    ending = threading.Thread(target=context.term, name="end of sockets", daemon=True)
    ending.start()
    ending.join(_END_S)
    if ending.is_alive():
        logger.warning("the connections to other processes did not end in %g s", _END_S)
