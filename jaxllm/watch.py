"""Detects hangs: a process that is silent, a step that never ends.

A wait for a device cannot be interrupted, and a stopped process cannot report itself. So a thread
beside a loop checks every second that the loop makes progress, and sends a beat. The receivers of
beats measure the silence between them. Only time in which the measuring process itself was running
counts: a suspended process, as on a machine that sleeps, could not hear anything.
"""

import faulthandler
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxllm.config import EngineConfig
from jaxllm.logging import init_logger

logger = init_logger(__name__)

# How often the watch checks the work and sends a beat.
LOOK_S = 1.0
# If two checks are further apart than this, the process was suspended in between.
AWAY_S = 3.0
# The factor of the limits for work that takes long by its nature.
PATIENCE = 12


class Silence:
    """Measures how long nothing has been heard. The listener calls `is_too_long` about every second
    or more often. If the listener was suspended in between, the count starts again. A limit of 0
    means no limit."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic):
        self.limit_s = limit_s
        self._clock = clock
        self.heard()

    def heard(self) -> None:
        """Note that something was heard."""
        self.seconds = 0.0
        self._looked = self._clock()

    def is_too_long(self) -> bool:
        now = self._clock()
        since = now - self._looked
        self._looked = now
        self.seconds = self.seconds + since if since < AWAY_S else 0.0
        return 0 < self.limit_s < self.seconds


class Work(NamedTuple):
    """Work that should make progress: its number changes with each progress."""

    name: str
    number: int
    takes_long: bool = False


class Watch(threading.Thread):
    """Checks the work of a loop every second, since the loop may hang anywhere.

    `at_work` returns the work that should make progress now. This thread calls it, and the owner
    may replace it. Work that it no longer returns has ended. `on_hang` is called for work without
    progress for longer than the config allows, after the stacks of all threads are logged.
    `on_look` is called at every check, to send a beat.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_hang: Callable[[str], None],
        on_look: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(name="watch", daemon=True)
        self.at_work: Callable[[], Sequence[Work]] = lambda: ()
        self._limit_s = config.liveness.engine_iteration_timeout
        if config.compilation.compiles_in_steps:
            self._limit_s *= PATIENCE  # steps compile
        self._on_hang = on_hang
        self._on_look = on_look
        self._clock = clock
        self._seen: dict[Work, Silence] = {}
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            self._on_look()
            reason = self.look()
            if reason is not None:
                logger.error("%s", reason)
                faulthandler.dump_traceback()
                self._on_hang(reason)
                return

    def stop(self) -> None:
        self._stopping.set()

    def look(self) -> str | None:
        """Describe the first work that hangs; None if none does."""
        at_work = self.at_work()
        self._seen = {work: self._seen.get(work) or self._silence(work) for work in at_work}
        for work, silence in self._seen.items():
            if silence.is_too_long():
                return (
                    f"the engine hangs: {work.name} has not got on for {silence.seconds:.0f} s "
                    f"(engine_iteration_timeout allows {silence.limit_s:g})"
                )
        return None

    def _silence(self, work: Work) -> Silence:
        limit_s = self._limit_s * PATIENCE if work.takes_long else self._limit_s
        return Silence(limit_s, self._clock)
