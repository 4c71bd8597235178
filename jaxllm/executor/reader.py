"""Waits for device results in a thread of its own: a wait of JAX cannot be interrupted, and a
device that waits for a lost device never answers."""

import queue
import threading
from collections.abc import Callable

from jaxllm.executor.base import PendingResult
from jaxllm.scheduler.schedule import StepResult


class Reading:
    """A step whose result the reader waits for."""

    def __init__(self, pending: PendingResult):
        self._pending = pending
        self.done = threading.Event()
        self._result: StepResult | None = None
        self._error: Exception | None = None

    def read(self) -> None:
        try:
            self._result = self._pending.result()
        except Exception as error:
            self._error = error
        self.done.set()

    def result(self) -> StepResult:
        """Return the result, or raise the step's error. The step must be done."""
        if self._error is not None:
            raise self._error
        assert self._result is not None, "not done"
        return self._result


class Reader:
    """Waits for steps one after another. Its thread does not keep the process alive."""

    def __init__(self, then: Callable[[Reading], None] = lambda reading: None):
        self._then = then
        self._queue: queue.SimpleQueue[Reading] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="reader", daemon=True).start()

    def read(self, pending: PendingResult) -> Reading:
        reading = Reading(pending)
        self._queue.put(reading)
        return reading

    def _run(self) -> None:
        while True:
            reading = self._queue.get()
            reading.read()
            self._then(reading)
