"""Delays Ctrl-C until it can do no harm: between two steps, never inside one."""

import signal
import threading
from types import FrameType


class InterruptsBetweenSteps:
    """A context in which Ctrl-C waits for `check`. A second Ctrl-C interrupts at once.

    It works only in the main thread, where signals arrive, and only in place of Python's own
    handler: a program that handles SIGINT itself keeps its handler.
    """

    def __init__(self) -> None:
        self._pending = False
        self._installed = False

    def __enter__(self) -> "InterruptsBetweenSteps":
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            signal.signal(signal.SIGINT, self._on_interrupt)
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self._pending:
            raise KeyboardInterrupt

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._pending:
            raise KeyboardInterrupt
        self._pending = True
