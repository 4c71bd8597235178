"""Progress of a compilation: a bar on a terminal, else lines in the log.

It goes to standard error, and only if the log level is info or lower.
"""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Hashable, Iterator
from types import TracebackType

from tqdm import tqdm

from jaxllm.logging import init_logger

logger = init_logger(__name__)

_LINE_EVERY_S = 10.0
_BAR_EVERY_S = 1.0


class CompileProgress:
    """Counts compiled programs, also from several threads. Within its context, a thread reports
    progress. It reports nothing if there is nothing to compile."""

    def __init__(self, total: int, done: int = 0):
        """`done` of the programs exist already."""
        self._total, self._done = total, done
        self._under_way: dict[Hashable, None] = {}
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._over = threading.Event()
        self._bar: tqdm | None = None
        self._thread = threading.Thread(target=self._tell_on, name="progress", daemon=True)

    def __enter__(self) -> "CompileProgress":
        if self._done == self._total or not logger.isEnabledFor(logging.INFO):
            self._over.set()
            return self
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=self._total,
                initial=self._done,
                desc="compiling",
                bar_format="{desc}: {n_fmt}/{total_fmt} programs|{bar:20}| {elapsed} {postfix}",
                file=sys.stderr,
                leave=False,
            )
        else:
            logger.info("compiling %s", str(self))  # format the current state
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._bar is not None:
            self._bar.close()

    def __str__(self) -> str:
        with self._lock:
            told = f"{self._done} of {self._total} programs, {self._seconds:.0f} s"
            names = ", ".join(map(str, self._under_way))
        return f"{told}; under way: {names}" if names else told

    @contextlib.contextmanager
    def compiling(self, key: Hashable) -> Iterator[None]:
        """Mark a program as being compiled within this context."""
        with self._lock:
            self._under_way[key] = None
        yield
        with self._lock:
            del self._under_way[key]
            self._done += 1

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._start

    def _tell_on(self) -> None:
        while not self._over.wait(_LINE_EVERY_S if self._bar is None else _BAR_EVERY_S):
            self.tell()

    def tell(self) -> None:
        """Report the progress."""
        if self._bar is None:
            logger.info("compiling %s", str(self))  # format the current state
            return
        with self._lock:
            self._bar.n = self._done
            self._bar.set_postfix_str(", ".join(map(str, self._under_way)), refresh=False)
        self._bar.refresh()
