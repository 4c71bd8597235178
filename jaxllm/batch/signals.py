"""SIGTERM and Ctrl-C stop a batch: requests under way may finish within a grace period."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(KeyboardInterrupt):
    """The batch was stopped. The signal handler raises this itself where nothing can be lost."""


class StopSignal:
    """A context in which both signals stop a batch."""

    def __init__(self, grace_period_s: float):
        self._grace_period_s = grace_period_s
        self._deadline: float | None = None
        self._is_deferred = False
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def is_requested(self) -> bool:
        return self._deadline is not None

    @property
    def is_due(self) -> bool:
        """Whether the grace period is over. A second signal ends it."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Within this context a signal raises nothing; the caller checks `is_requested`."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():  # signals arrive only there
            self._previous = {one: signal.signal(one, self._on_signal) for one in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for one, handler in self._previous.items():
            signal.signal(one, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_deferred:
            raise Stopped
        grace = 0.0 if self.is_requested else self._grace_period_s
        self._deadline = time.monotonic() + grace
