"""The engine core: schedule → execute → update, over and over.

With overlap (the default) a step is dispatched before the tokens of the one before it are read,
so the device finds its next step waiting; who drives the core may put that off for as long as it
has time (`spare_s`). A pipeline has as many steps under way as stages, and with overlap one more.
Single-threaded; nothing here waits for a client.
"""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.engine.commands import Answer, Command, obey
from jaxllm.engine.features import host_features
from jaxllm.engine.pace import Pace
from jaxllm.errors import EngineDeadError, JaxLLMError, ValidationError
from jaxllm.executor.base import Executor, PendingResult
from jaxllm.executor.profiler import Profiler
from jaxllm.logging import init_logger
from jaxllm.messages import EngineInfo, EngineOutput, EngineRequest, FinishReason
from jaxllm.metrics.startup import Phase
from jaxllm.metrics.stats import EngineStats
from jaxllm.scheduler.kv.manager import KVCacheManager
from jaxllm.scheduler.lanes import Lanes
from jaxllm.scheduler.policy import get_scheduling_policy
from jaxllm.scheduler.schedule import Schedule, StepResult
from jaxllm.scheduler.scheduler import Scheduler

logger = init_logger(__name__)

# A step that was seen on the device so long ago has ended now.
_JUST_NOW_S = 0.002


class EngineCore:
    """One engine: a scheduler and the executor that runs its steps."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Callable[[], float] = time.perf_counter,
    ):
        policy = get_scheduling_policy(config.scheduler.scheduling_policy)
        self.executor = executor
        self._clock = clock
        self.info: EngineInfo = self.executor.info
        overlap = config.scheduler.async_scheduling
        self._num_stages = config.parallel.pipeline_parallel_size
        self._stats = EngineStats(overlap=overlap)
        if not overlap:
            logger.info("async_scheduling is off: the device waits for the host at every step")
        self.scheduler = Scheduler(
            max_num_seqs=self.info.max_num_seqs,
            max_num_batched_tokens=self.info.max_num_batched_tokens,
            max_model_len=self.info.max_model_len,
            long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
            enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
            kv=KVCacheManager(
                groups=self.info.cache_groups,
                block_size=self.info.block_size,
                enable_prefix_caching=config.cache.enable_prefix_caching,
            ),
            lanes=(
                Lanes(self._num_stages, max_in_flight=1 if overlap else 0)
                if self._num_stages > 1
                else None
            ),
            policy=policy,
            features=host_features(config),
            check_invariants=config.scheduler.check_invariants,
            stats=self._stats,
        )
        # Steps that may be on the device when the next one is dispatched.
        self._max_in_flight = self._num_stages - 1 + (1 if overlap else 0)
        self._in_flight: deque[tuple[Schedule, PendingResult]] = deque()
        self._nobody_can_go_on = False  # until one of them comes back, or somebody else comes
        self._seen_running_at = -math.inf
        self._idle_since: float | None = None  # or since then; None: nobody wanted the device
        self._pace = Pace() if overlap and self._num_stages == 1 else None
        # Parts that sleep; no step is dispatched while there are any.
        self.asleep: frozenset[str] = frozenset()
        self.late_outputs: list[EngineOutput] = []  # of what ended as it fell asleep
        self.is_on_one_host = config.parallel.nnodes == 1
        self.profiler = Profiler(config.profiler.profile_dir)
        self._num_ended = 0  # steps that have come back or failed
        # Set when there is nothing to go on with.
        self._end: JaxLLMError | None = None

    def add_request(self, request: EngineRequest) -> None:
        """Take over a validated request; a duplicate id is refused."""
        if self._end is not None:
            raise self._end
        if not self.scheduler.has_unfinished_requests():
            self._idle_since = None  # for want of work
        self.scheduler.add_request(request)
        self._nobody_can_go_on = False

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests at any moment, without output: whoever aborts a request has let go of it.
        Unknown and finished ones are ignored."""
        self.scheduler.abort_requests(request_ids)
        self._nobody_can_go_on = False

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        if self.asleep or self.late_outputs:
            return bool(self.late_outputs)
        return bool(self._in_flight) or self.scheduler.has_unfinished_requests()

    def check(self) -> None:
        """Raise if there is no engine any more."""
        if self._end is not None:
            raise self._end
        self.executor.check()

    def progress(self) -> list[int | None]:
        """How many steps have ended, or None if there is nothing to do; of each replica, and there
        is one. May be asked from any thread."""
        return [self._num_ended if self.has_work() else None]

    @property
    def spare_s(self) -> float:
        """How long the next step may be put off: the device has one to run until then. Who comes
        meanwhile is in the next one, and not in the one after it."""
        if self._pace is None or len(self._in_flight) != 1:
            return 0.0
        if self.scheduler.num_running == self.info.max_num_seqs:
            return 0.0  # nobody else can be in it
        _, running = self._in_flight[0]
        if running.is_ready():
            return 0.0  # it is late already
        return self._pace.spare_s(self._clock())

    @property
    def is_due(self) -> bool:
        """Whether it is time for `step`, and that would not wait for the device."""
        if not self._in_flight or self.late_outputs:
            return True
        if self._in_flight[0][1].is_ready():
            return True
        self._seen_running_at = self._clock()
        return len(self._in_flight) <= self._num_kept and self.spare_s <= 0

    def step(self, *, wait: bool = True) -> list[EngineOutput]:
        """Dispatch one step, if there is one to dispatch, and return what an earlier one brought;
        if that is still on the device and nobody wants to wait, a later call returns it."""
        if self._end is not None:
            raise self._end
        outputs, self.late_outputs = self.late_outputs, []
        if self.asleep:
            return outputs
        start = self._clock()
        if len(self._in_flight) <= self._num_kept:
            self._dispatch_next()
        num_kept = self._num_kept
        while len(self._in_flight) > num_kept:
            if not wait and not self._in_flight[0][1].is_ready():
                break
            outputs += self._collect()
        self._stats.step_s += self._clock() - start
        return outputs

    def call(self, command: Command[Any, Answer]) -> Answer:
        """Do what a command says."""
        return obey(command, [self])

    def settle(self) -> None:
        """Wait for the steps that are under way. The next step returns what they brought."""
        while self._in_flight:
            self.late_outputs += self._collect()
        if self._end is not None:
            raise self._end
        self._idle_since = None  # nobody wants the device any more

    def stats(self) -> EngineStats:
        """The figures as of now; they do not change any more."""
        return dataclasses.replace(
            self._stats,
            num_token_rows=self.executor.num_token_rows,
            pack_s=self.executor.pack_s,
            num_compiles_after_warmup=self.executor.num_compiles_after_warmup,
            step_sizes=list(self._stats.step_sizes),
        )

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV cache that requests hold now."""
        return self._stats.kv_cache_usage

    @property
    def startup(self) -> list[Phase]:
        """What was done before the engine was ready."""
        return self.executor.startup

    def shutdown(self) -> None:
        self._end = ValidationError("the engine has been shut down; make a new one")
        self._in_flight.clear()
        try:
            self.profiler.close()
        finally:
            self.executor.shutdown()

    @property
    def _num_kept(self) -> int:
        """How many steps may be under way when the next one is dispatched."""
        if self._in_flight and isinstance(self._in_flight[-1][1], _NotDispatched):
            return 0
        return len(self._in_flight) - 1 if self._nobody_can_go_on else self._max_in_flight

    def _dispatch_next(self) -> None:
        start = self._clock()
        schedule = self.scheduler.schedule()
        # When a step has come back, somebody may.
        self._nobody_can_go_on = schedule is None and bool(self._in_flight)
        if schedule is not None:
            # First of all: the scheduler counts on hearing of every step, whatever comes between.
            self._in_flight.append((schedule, _INTERRUPTED))
        self._stats.schedule_s += self._clock() - start
        if schedule is None:
            return
        self._dispatch(schedule)
        if self._pace is not None:
            self._pace.planned(self._clock() - start)

    def _dispatch(self, schedule: Schedule) -> None:
        """Send the newest step on its way. If that fails, it is told when its turn comes: the steps
        before it are not affected."""
        if len(self._in_flight) == 1 and self._idle_since is not None:
            self._stats.device_idle_s += self._clock() - self._idle_since
        try:
            with self.profiler.step(schedule.step):
                pending = self.executor.execute(schedule)
        except Exception as error:
            self._in_flight[-1] = (schedule, _NotDispatched(error))
            return
        self._in_flight[-1] = (schedule, pending)
        if len(self._in_flight) == 1:
            self._note_begin()
        self._stats.num_steps += 1
        self._count_stages(schedule)

    def _count_stages(self, schedule: Schedule) -> None:
        """Count the stages that have a step to run now. Of the steps that the newest waits for, the
        last has to be through before it begins, so only those after it are beside it."""
        waits_for = schedule.carried_from
        beside = len(self._in_flight) if waits_for is None else schedule.step - waits_for
        self._stats.num_stages_offered += self._num_stages
        self._stats.num_stages_filled += min(beside, len(self._in_flight), self._num_stages)

    def _collect(self) -> list[EngineOutput]:
        schedule, pending = self._in_flight[0]
        start = self._clock()
        was_seen = not pending.is_ready() or start - self._seen_running_at < _JUST_NOW_S
        try:
            # Ctrl-C most likely comes here; the step is then still the first to be collected.
            result = pending.result()
        except Exception as error:
            return self._recover(error)
        ready = self._clock()
        self._in_flight.popleft()
        self._num_ended += 1
        self._nobody_can_go_on = False
        if self._pace is not None:
            self._pace.end(ready, was_seen)
        self._note_begin()
        outputs = self.scheduler.update(schedule, result)
        self._stats.device_wait_s += ready - start
        self._stats.update_s += self._clock() - ready
        self._idle_since = ready
        return outputs

    def _note_begin(self) -> None:
        """The first of the steps in flight begins now, if there is one."""
        if self._pace is not None and self._in_flight:
            self._pace.begin(self._in_flight[0][0], self._clock())

    def _recover(self, error: Exception) -> list[EngineOutput]:
        """The oldest step failed. The requests in it, and in those dispatched after it, end with an
        error; the KV cache is gone, so all others start over, if there is an engine left."""
        lost = [schedule for schedule, _ in self._in_flight]
        logger.exception("a step failed; %d steps in flight are lost", len(lost), exc_info=error)
        message = f"{type(error).__name__}: {error}"[:500]
        outputs = [out for schedule in lost for out in self.scheduler.fail(schedule, message)]
        self._in_flight.clear()
        self._num_ended += len(lost)
        self._nobody_can_go_on = False
        if isinstance(error, EngineDeadError):
            self._end = error
            return outputs + self.scheduler.end_all(FinishReason.ERROR, message)
        self.scheduler.restart()
        self.executor.reset()
        return outputs


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
