"""Tells what hangs from what is at work: a process that says nothing, a step that never ends.

A wait for a device can be neither interrupted nor ended, and a process that is stopped cannot tell.
So a thread beside a loop looks whether it gets on, and says every second that the process lives;
whoever hears that listens for how long there is silence. All times are those in which this process
itself was running: one that was stopped, as machines are that sleep, has heard nothing meanwhile.
"""

import faulthandler
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxllm.config import EngineConfig
from jaxllm.logging import init_logger

logger = init_logger(__name__)

# How often it is looked, and said that the process lives.
LOOK_S = 1.0
# Between two looks of a process that runs there is no more than this.
AWAY_S = 3.0
# So many times the limit of a step is that of what takes long by its nature.
PATIENCE = 12


class Silence:
    """For how long nothing has been heard. Asked at least every second or so by whoever listens; if
    that was not running itself in between, it begins anew. Without a limit (0) it may last."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic):
        self.limit_s = limit_s
        self._clock = clock
        self.heard()

    def heard(self) -> None:
        """There was something."""
        self.seconds = 0.0
        self._looked = self._clock()

    def is_too_long(self) -> bool:
        now = self._clock()
        since = now - self._looked
        self._looked = now
        self.seconds = self.seconds + since if since < AWAY_S else 0.0
        return 0 < self.limit_s < self.seconds


class Work(NamedTuple):
    """Something that should get on: its number changes whenever it has."""

    name: str
    number: int
    takes_long: bool = False


class Watch(threading.Thread):
    """Looks every second at the work of a loop, which may be stuck in any place.

    `at_work` tells what should get on now; it is called from this thread, and may be replaced. What
    it no longer names has ended. `on_hang` hears of work that has not got on for as long as the
    config allows, when the log says where each thread is. `on_look` is called at every look: this
    process lives.
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
        if config.compilation.enforce_eager:
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
        """What hangs, if anything does."""
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
