"""Replaces an engine's executor: computes when a step would be done, and runs nothing."""

import numpy as np

from jaxllm.lora.shelf import HostShelf
from jaxllm.messages import EngineInfo
from jaxllm.metrics.memory import DeviceMemory
from jaxllm.metrics.startup import Phase
from jaxllm.plan.buckets import Bucket, BucketTable
from jaxllm.scheduler.schedule import LateMasks, Schedule, StepResult
from jaxllm.simulation.mover import HostMemory, SimulatedMover
from jaxllm.simulation.step_time import StepTime

# A token that ends no answer.
_TOKEN = 11


class SimulatedExecutor:
    """One replica's devices, and the clock of its host.

    A step begins when it is dispatched, the first stage is free, and the tokens that it carries
    over are computed. Each stage begins when the previous stage is done and it is free itself.
    """

    num_compiles_after_warmup = 0

    def __init__(
        self,
        info: EngineInfo,
        buckets: tuple[Bucket, ...],
        step_time: StepTime,
        host_s_per_step: float,
        host_memory: HostMemory | None = None,
    ):
        self.info = info
        self.now = 0.0
        self.busy_s = 0.0  # of the busiest stage
        self.num_token_rows = 0
        self.pack_s = 0.0
        self.startup: list[Phase] = []
        self._buckets = BucketTable(buckets)
        self._step_time = step_time
        # Half of the time passes before a step is dispatched, half when its tokens are there.
        self._half_host_s = host_s_per_step / 2
        self._free_at = [0.0] * step_time.num_stages
        self._busy_s = [0.0] * step_time.num_stages
        self._done_at: dict[int, float] = {}  # of steps in flight
        self._last_done = 0.0
        self._num_collected = 0
        self._mover = SimulatedMover(self, () if host_memory is None else host_memory.seconds)

    def device_memory(self) -> list[DeviceMemory]:
        return []

    def execute(self, schedule: Schedule) -> "_Pending":
        bucket = self._buckets.find(
            num_tokens=schedule.total_tokens,
            num_rows=schedule.num_rows,
            decode_only=schedule.decode_only,
        )
        self.num_token_rows += bucket.num_tokens
        self.now += self._half_host_s
        if schedule.moves is not None:
            self._mover.send(schedule.moves)
        begin = max(self.now, self._tokens_there(schedule), self._mover.loaded_at)
        for stage, seconds in enumerate(self._step_time.seconds(bucket, schedule)):
            begin = max(begin, self._free_at[stage]) + seconds
            self._free_at[stage] = begin
            self._busy_s[stage] += seconds
        self.busy_s = max(self._busy_s)
        self._done_at[schedule.step] = self._last_done = begin
        return _Pending(self, schedule)

    def late_drafts(self) -> None:
        return None

    def sample(self, masks: LateMasks) -> None:
        raise AssertionError("simulated requests have no grammar")

    def is_done(self, schedule: Schedule) -> bool:
        return self._done_at[schedule.step] <= self.now

    def collect(self, schedule: Schedule) -> StepResult:
        """Wait for a step and return its result."""
        self.now = max(self.now, self._done_at.pop(schedule.step))
        self._num_collected += 1
        return StepResult(np.full(schedule.num_rows, _TOKEN, np.int32), None)

    def handle_tokens(self) -> None:
        """Advance the clock by the host's time for the tokens that have arrived."""
        self.now += self._num_collected * self._half_host_s
        self._num_collected = 0

    def shelf(self) -> HostShelf:
        assert self.info.adapters is not None
        return HostShelf(self.info.adapters, lambda adapter: adapter)  # no step reads it

    def mover(self) -> SimulatedMover:
        return self._mover

    def check(self) -> None: ...

    def reset(self) -> None:
        raise AssertionError("simulated steps do not fail")

    def sleep(self, *, keep_weights: bool) -> None:
        raise AssertionError("simulated devices hold nothing that they could give back")

    def wake_weights(self) -> None: ...

    def wake_cache(self) -> None: ...

    def begin_shutdown(self) -> None: ...

    def shutdown(self) -> None: ...

    def _tokens_there(self, schedule: Schedule) -> float:
        """The time when the tokens exist that this step carries over from steps in flight."""
        if schedule.carried_from is None:
            # Any earlier step may be the source. A single stage runs them in order anyway.
            return self._last_done if len(self._free_at) > 1 else 0.0
        return self._done_at.get(schedule.carried_from, 0.0)


class _Pending:
    def __init__(self, executor: SimulatedExecutor, schedule: Schedule):
        self._executor, self._schedule = executor, schedule

    def is_ready(self) -> bool:
        return self._executor.is_done(self._schedule)

    def result(self) -> StepResult:
        return self._executor.collect(self._schedule)
