"""A queue whose reader waits for sockets, too."""

import queue
import threading
from typing import Any, Generic, TypeVar

import zmq

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Items for the thread that polls `socket`. Any thread may put some there."""

    def __init__(self, context: "zmq.Context[Any]"):
        address = f"inproc://mailbox-{id(self)}"
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.socket = context.socket(zmq.PULL)
        self._bell = context.socket(zmq.PUSH)
        for one in (self.socket, self._bell):  # no thread that puts may wait
            one.setsockopt(zmq.SNDHWM, 0)
            one.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind(address)
        self._bell.connect(address)
        self._ringing = threading.Lock()

    def put(self, item: Item) -> None:
        self._items.put(item)
        with self._ringing:
            if not self._bell.closed:
                self._bell.send(b"")

    def take(self) -> Item:
        """Take one item, after a poll has found the socket readable."""
        self.socket.recv()
        return self._items.get()

    def close(self) -> None:
        with self._ringing:
            self._bell.close(linger=0)
        self.socket.close(linger=0)
