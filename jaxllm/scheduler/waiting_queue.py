"""The requests that wait for admission, in policy order.

The queue is a binary heap. A request that ends while it waits (an abort) stays in the heap until it
reaches the top, or until the finished requests outnumber the others.
"""

import heapq

from jaxllm.scheduler.request import Request


class WaitingQueue:
    """A priority queue over `Request.order`, which is unique."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple, Request]] = []
        self._num_finished = 0  # entries of finished requests

    def __len__(self) -> int:
        return len(self._heap) - self._num_finished

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.order, request))

    def peek(self) -> Request | None:
        """Return the first request without removing it."""
        heap = self._heap
        while heap:
            request = heap[0][1]
            if not request.is_finished:
                return request
            heapq.heappop(heap)
            self._num_finished -= 1
        return None

    def pop(self) -> Request:
        """Remove and return the first request."""
        request = self.peek()
        assert request is not None, "pop from an empty waiting queue"
        heapq.heappop(self._heap)
        return request

    def forget_finished(self) -> None:
        """Note that one request of this queue has just finished."""
        self._num_finished += 1
        # To drop them all at once when they are the majority costs O(1) per finished request.
        if self._num_finished > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if not entry[1].is_finished]
            heapq.heapify(self._heap)
            self._num_finished = 0

    def requests(self) -> list[Request]:
        """Return the waiting requests in no particular order."""
        return [request for _, request in self._heap if not request.is_finished]
