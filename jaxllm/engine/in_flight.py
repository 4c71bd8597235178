"""The steps in flight: dispatched, awaited and taken in order.

With overlap (the default) a step is dispatched before the tokens of the previous step are read, so
the device finds its next step waiting. The engine may delay the dispatch while the device is still
busy (`spare_s`). A pipeline has as many steps in flight as stages, and with overlap one more.

A step with late rows is dispatched in two parts: as far as the logits, and, when the masks of these
rows are there, their sampling. The next step is planned after that.
"""

import math
from collections import deque
from collections.abc import Callable

import numpy as np

from jaxllm.engine.pace import Pace
from jaxllm.executor.base import Executor, PendingResult
from jaxllm.executor.profiler import Profiler
from jaxllm.metrics.stats import EngineStats
from jaxllm.scheduler.schedule import LateMasks, Schedule, StepResult

# If a step was seen running so short a time ago, it has ended just now.
_JUST_NOW_S = 0.002


class InFlight:
    """The steps of one engine that are planned and not yet taken, oldest first."""

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
        self.awaits_masks = False  # whether the newest step is still to sample its late rows
        self._nobody_can_go_on = False
        self._seen_running_at = -math.inf
        self._idle_since: float | None = None  # None: no request wanted the device
        self._pace = Pace() if overlap and num_stages == 1 else None

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def num_kept(self) -> int:
        """How many steps may be in flight when the next one is dispatched."""
        if self._steps and isinstance(self._steps[-1][1], _NotDispatched):
            return 0
        return len(self._steps) - 1 if self._nobody_can_go_on else self._max_kept

    @property
    def has_room(self) -> bool:
        """Whether the next step may be planned and dispatched."""
        return len(self._steps) <= self.num_kept and not self.awaits_masks

    def is_ready(self) -> bool:
        """Whether the oldest step can be taken without waiting."""
        return self._steps[0][1].is_ready()

    @property
    def spare_s(self) -> float:
        """How long the next step may be delayed while the device is still busy."""
        if self._pace is None or len(self._steps) != 1:
            return 0.0
        if self.is_ready():
            return 0.0  # the next step is already late
        return self._pace.spare_s(self._clock())

    def look_again(self) -> None:
        """Note that the requests have changed, so some may be able to go on now."""
        self._nobody_can_go_on = False

    def rest(self) -> None:
        """Note that no request wants the device: idle time until the next step does not count."""
        self._idle_since = None

    def note_running(self) -> None:
        """Note that the device still runs the oldest step."""
        self._seen_running_at = self._clock()

    def expect(self, schedule: Schedule | None) -> None:
        """Note a planned step, or None if no request can go on before a step in flight comes back.
        Call this right after planning: even after Ctrl-C every planned step must be taken or lost.
        """
        self._nobody_can_go_on = schedule is None and bool(self._steps)
        if schedule is not None:
            self._steps.append((schedule, _INTERRUPTED))

    def dispatch(self, begun: float) -> None:
        """Dispatch the newest step, whose planning began at `begun`. If that fails, `take` raises
        the error when the step's turn comes: earlier steps are not affected."""
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
            self.awaits_masks = schedule.late_rows is not None
            if len(self._steps) == 1:
                self._note_begin()
            self._stats.num_steps += 1
            self._count_stages(schedule)
        if self._pace is not None:
            self._pace.planned(self._clock() - begun)

    def late_drafts(self) -> np.ndarray | None:
        """The drafts of the newest step's late rows, as in `Executor`. If that fails, it is as if
        the step had not been dispatched."""
        try:
            return self.executor.late_drafts()
        except Exception as error:
            self.awaits_masks = False
            self._steps[-1] = (self._steps[-1][0], _NotDispatched(error))
            return None

    def sample(self, masks: LateMasks) -> None:
        """Let the newest step sample its late rows, with a mask for each. If that fails, it is as
        if the step had not been dispatched."""
        self.awaits_masks = False
        schedule, pending = self._steps[-1]
        self._steps[-1] = (schedule, _INTERRUPTED)
        try:
            self.executor.sample(masks)
        except Exception as error:
            self._steps[-1] = (schedule, _NotDispatched(error))
        else:
            self._steps[-1] = (schedule, pending)

    def take(self) -> tuple[Schedule, StepResult]:
        """Wait for the oldest step, and remove it. A failed step and all later steps stay until
        `lose`."""
        schedule, pending = self._steps[0]
        start = self._clock()
        was_seen = not pending.is_ready() or start - self._seen_running_at < _JUST_NOW_S
        # Ctrl-C most likely arrives here. The step is then still the first to be taken.
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
        """Forget all steps, and return their Schedules."""
        lost = [schedule for schedule, _ in self._steps]
        self._steps.clear()
        self.awaits_masks = False
        self.num_ended += len(lost)
        self._nobody_can_go_on = False
        return lost

    def _note_begin(self) -> None:
        """Note that the oldest step, if there is one, begins now."""
        if self._pace is not None and self._steps:
            self._pace.begin(self._steps[0][0], self._clock())

    def _count_stages(self, schedule: Schedule) -> None:
        """Count the stages that have a step to run now. The newest step begins after the step
        `carried_from`, so only later steps can run beside it."""
        waits_for = schedule.carried_from
        beside = len(self._steps) if waits_for is None else schedule.step - waits_for
        self._stats.num_stages_offered += self._num_stages
        self._stats.num_stages_filled += min(beside, len(self._steps), self._num_stages)


class _NotDispatched:
    """A step that the executor refused; without an error, a step that it never got."""

    def __init__(self, error: Exception | None = None):
        self._error = error

    def is_ready(self) -> bool:
        return True

    def result(self) -> StepResult:
        raise self._error or RuntimeError("interrupted")


# Stands for a step until it is dispatched.
_INTERRUPTED = _NotDispatched()
