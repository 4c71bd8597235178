"""Compiles programs that no step waits for, behind the steps that run meanwhile."""

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable

from jaxllm.logging import init_logger

logger = init_logger(__name__)


class CompileBehind:
    """Threads that make programs, the last ones first: those of small steps, which come first.

    One processor is left to the thread that runs steps, and compiles what it needs at once.
    """

    def __init__(self, keys: Iterable[Hashable], make: Callable[[Hashable], object], most: int):
        self._left = list(keys)
        self._make = make
        self._is_stopping = threading.Event()
        self._start = time.perf_counter()
        num_threads = max(1, min(most, len(os.sched_getaffinity(0)) - 1))
        self._num_running, self._num_failed = num_threads, 0
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, name="compile behind") for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def begin_to_stop(self) -> None:
        """Begin with no more programs."""
        self._is_stopping.set()

    def stop(self) -> None:
        """Begin with no more programs, and wait for what is under way."""
        self.begin_to_stop()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        # A process whose main thread has ended waits for this one, and needs no programs.
        while threading.main_thread().is_alive() and not self._is_stopping.is_set():
            with self._lock:
                if not self._left:
                    break
                key = self._left.pop()
            try:
                self._make(key)
            except Exception:
                # The step that needs the program tries again, and gets the error.
                logger.warning("cannot compile %s behind the steps", key, exc_info=True)
                with self._lock:
                    self._num_failed += 1
        with self._lock:
            self._num_running -= 1
            has_all = not (self._num_running or self._num_failed or self._left)
        if has_all:
            logger.info(
                "compiled behind the steps: all programs are there, after %.1f s", self._seconds
            )

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._start
