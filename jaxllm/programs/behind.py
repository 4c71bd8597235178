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
        self._stopping = threading.Event()
        self._start = time.perf_counter()
        num_threads = max(1, min(most, (os.cpu_count() or 1) - 1))
        self._running = num_threads
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, name="compile behind") for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Compile nothing more, and wait for what is under way."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        # A process whose main thread has ended waits for this one, and needs no programs.
        while threading.main_thread().is_alive() and not self._stopping.is_set():
            with self._lock:
                if not self._left:
                    break
                key = self._left.pop()
            try:
                self._make(key)
            except Exception:
                # The step that needs the program gets the error.
                logger.warning("cannot compile %s behind the steps", key, exc_info=True)
        with self._lock:
            self._running -= 1
            is_last = self._running == 0 and not self._left
        if is_last:
            logger.info(
                "compiled behind the steps: all programs are there, after %.1f s", self._seconds
            )

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._start
