"""What is on its way to the device: steps that are dispatched, awaited, and taken in their order.

With overlap (the default) a step is dispatched before the tokens of the one before it are read, so
the device finds its next step waiting; whoever drives the engine may put that off for as long as it
has time (`spare_s`). A pipeline has as many steps under way as stages, and with overlap one more.
"""

import math
from collections import deque
from collections.abc import Callable

from jaxllm.engine.pace import Pace
from jaxllm.executor.base import Executor, PendingResult
from jaxllm.executor.profiler import Profiler
from jaxllm.metrics.stats import EngineStats
from jaxllm.scheduler.schedule import Schedule, StepResult

# A step that was seen on the device so long ago has ended now.
_JUST_NOW_S = 0.002


class InFlight:
    """The steps of one engine that have been planned and not taken, the oldest first."""

    def __init__(
        self,
        executor: Executor,
        profiler: Profiler,
        stats: EngineStats,
        clock: Callable[[], float],
        *,
        num_stages: int,
        overlap: bool,
    ):
        self.executor = executor
        self.num_ended = 0  # steps that have come back or failed
        self._profiler = profiler
        self._stats = stats
        self._clock = clock
        self._num_stages = num_stages
        # Steps that may be on the device when the next one is dispatched.
        self._max_kept = num_stages - 1 + (1 if overlap else 0)
        self._steps: deque[tuple[Schedule, PendingResult]] = deque()
        self._nobody_can_go_on = False
        self._seen_running_at = -math.inf
        self._idle_since: float | None = None  # or since then; None: nobody wanted the device
        self._pace = Pace() if overlap and num_stages == 1 else None

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def num_kept(self) -> int:
        """How many steps may be under way when the next one is dispatched."""
        if self._steps and isinstance(self._steps[-1][1], _NotDispatched):
            return 0
        return len(self._steps) - 1 if self._nobody_can_go_on else self._max_kept

    @property
    def has_room(self) -> bool:
        """Whether the next step may be planned and dispatched."""
        return len(self._steps) <= self.num_kept

    def is_ready(self) -> bool:
        """Whether the oldest step can be taken without waiting."""
        return self._steps[0][1].is_ready()

    @property
    def spare_s(self) -> float:
        """How long the next step may be put off: the device has one to run until then."""
        if self._pace is None or len(self._steps) != 1:
            return 0.0
        if self.is_ready():
            return 0.0  # it is late already
        return self._pace.spare_s(self._clock())

    def look_again(self) -> None:
        """There is news of the requests: some may go on that could not."""
        self._nobody_can_go_on = False

    def rest(self) -> None:
        """Nobody wants the device: until the next step it is not idle for lack of one."""
        self._idle_since = None

    def note_running(self) -> None:
        """The oldest step is seen on the device."""
        self._seen_running_at = self._clock()

    def expect(self, schedule: Schedule | None) -> None:
        """A step is planned, or no request can go on before one in flight comes back. Called first
        of all: the scheduler counts on hearing of every step, whatever comes between."""
        self._nobody_can_go_on = schedule is None and bool(self._steps)
        if schedule is not None:
            self._steps.append((schedule, _INTERRUPTED))

    def dispatch(self, begun: float) -> None:
        """Send the newest step, whose planning began then, on its way. If that fails, `take` raises
        why when its turn comes: the steps before it are not affected."""
        schedule, _ = self._steps[-1]
        if len(self._steps) == 1 and self._idle_since is not None:
            self._stats.device_idle_s += self._clock() - self._idle_since
        try:
            with self._profiler.step(schedule.step):
                pending = self.executor.execute(schedule)
        except Exception as error:
            self._steps[-1] = (schedule, _NotDispatched(error))
        else:
            self._steps[-1] = (schedule, pending)
            if len(self._steps) == 1:
                self._note_begin()
            self._stats.num_steps += 1
            self._count_stages(schedule)
        if self._pace is not None:
            self._pace.planned(self._clock() - begun)

    def take(self) -> tuple[Schedule, StepResult]:
        """Wait for the oldest step, and remove it. One that has failed stays, and so do those after
        it, until they are lost."""
        schedule, pending = self._steps[0]
        start = self._clock()
        was_seen = not pending.is_ready() or start - self._seen_running_at < _JUST_NOW_S
        # Ctrl-C most likely comes here; the step is then still the first to be taken.
        result = pending.result()
        ready = self._clock()
        self._steps.popleft()
        self.num_ended += 1
        self._nobody_can_go_on = False
        if self._pace is not None:
            self._pace.end(ready, was_seen)
        self._note_begin()
        self._stats.device_wait_s += ready - start
        self._idle_since = ready
        return schedule, result

    def lose(self) -> list[Schedule]:
        """Forget all steps, and return what they would have computed."""
        lost = [schedule for schedule, _ in self._steps]
        self._steps.clear()
        self.num_ended += len(lost)
        self._nobody_can_go_on = False
        return lost

    def _note_begin(self) -> None:
        """The oldest step begins now, if there is one."""
        if self._pace is not None and self._steps:
            self._pace.begin(self._steps[0][0], self._clock())

    def _count_stages(self, schedule: Schedule) -> None:
        """Count the stages that have a step to run now. Of the steps that the newest waits for, the
        last has to be through before it begins, so only those after it are beside it."""
        waits_for = schedule.carried_from
        beside = len(self._steps) if waits_for is None else schedule.step - waits_for
        self._stats.num_stages_offered += self._num_stages
        self._stats.num_stages_filled += min(beside, len(self._steps), self._num_stages)


class _NotDispatched:
    """A step that the executor refused; without an error, one that it has not heard of."""

    def __init__(self, error: Exception | None = None):
        self._error = error

    def is_ready(self) -> bool:
        return True

    def result(self) -> StepResult:
        raise self._error or RuntimeError("interrupted")


# Stands for a step until it is dispatched.
_INTERRUPTED = _NotDispatched()
