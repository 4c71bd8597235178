"""Simulates replicas that serve a trace, event by event, with the real engine core of each.

An event is the arrival of a request, or a replica whose host can plan its next step. Events are
processed in the order of their time, so the router sees at each moment what a real one would see.
The frontend, the network and failures are not simulated.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.engine.pace import LOOK_S
from jaxllm.engine.router import Router, RoutingPolicy
from jaxllm.messages import EngineRequest
from jaxllm.metrics.stats import EngineStats
from jaxllm.simulation.autoscaling import EVERY_S, Autoscaler
from jaxllm.simulation.deployment import Deployment
from jaxllm.simulation.executor import SimulatedExecutor
from jaxllm.simulation.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a trace. Arrays have an entry for each request, NaN for refused ones."""

    first_token_at: np.ndarray
    finished_at: np.ndarray
    num_output_tokens: np.ndarray
    stats: EngineStats  # of all replicas
    end: float  # time of the last token of all
    kv_cache_usage_mean: float  # over replicas and time
    kv_cache_usage_max: float  # over replicas and time
    busy_share: float  # of the devices' time
    replica_seconds: float  # for which chips are paid, also while a replica starts
    max_replicas: int  # the most that there were at once


def simulate(
    trace: Trace,
    deployment: Deployment,
    num_replicas: int,
    *,
    scheduling_policy: str = "fcfs",
    async_scheduling: bool = True,
    long_prefill_token_threshold: int = 0,
    enable_prefix_caching: bool = True,
    routing_policy: RoutingPolicy = "prefix",
    max_ongoing_requests: int | None = None,
    autoscaler: Autoscaler | None = None,
    startup_s: float = 0.0,
    on_progress: Callable[[int], None] = lambda num_finished: None,
) -> Outcome:
    """Simulate serving a trace. A replica has at most `max_ongoing_requests`; others wait for
    whichever has room first. An autoscaler changes the number of replicas, and each that it adds
    takes requests after `startup_s`."""
    config = EngineConfig.create(
        deployment.info.model,
        pipeline_parallel_size=deployment.step_time.num_stages,
        scheduling_policy=scheduling_policy,
        async_scheduling=async_scheduling,
        long_prefill_token_threshold=long_prefill_token_threshold,
        enable_prefix_caching=enable_prefix_caching,
    )
    fleet = _Fleet(config, deployment, num_replicas, autoscaler, startup_s)
    router = Router(range(num_replicas), routing_policy)
    first_token_at = np.full(len(trace), np.nan)
    finished_at = np.full(len(trace), np.nan)
    num_output_tokens = np.zeros(len(trace), np.int64)

    arrivals: list[float] = trace.arrivals.tolist()
    free_at: list[tuple[float, int]] = []  # a heap of the replicas with work
    waiting: deque[EngineRequest] = deque()  # for a replica with room

    def hand_out(now: float) -> None:
        while waiting and fleet.has_room(max_ongoing_requests):
            request = waiting.popleft()
            ranked = router.rank(request)
            chosen = next(one for one in ranked if fleet.is_free(one, max_ongoing_requests))
            router.move(request.request_id, chosen)
            if fleet.replicas[chosen].take(request, now):
                heapq.heappush(free_at, (fleet.replicas[chosen].plans_at, chosen))

    num_arrived = num_accepted = num_finished = 0
    while num_arrived < len(arrivals) or free_at:
        arrives = num_arrived < len(arrivals) and (
            not free_at or arrivals[num_arrived] <= free_at[0][0]
        )
        now = arrivals[num_arrived] if arrives else free_at[0][0]
        if fleet.scales_before(now):
            router.set_replicas(fleet.scale())
            hand_out(fleet.now)
            continue
        if arrives:
            request = trace.request(num_arrived, deployment.info.max_model_len)
            num_arrived += 1
            if request is None:
                continue
            num_output_tokens[num_arrived - 1] = request.max_tokens
            num_accepted += 1
            fleet.note(now, num_accepted - num_finished)
            waiting.append(request)
            hand_out(now)
            continue
        _, index = free_at[0]
        replica = fleet.replicas[index]
        for request_id in replica.finished:
            router.forget(request_id)
        begun, replica.finished = replica.step()
        for request_id in begun:
            first_token_at[int(request_id)] = replica.now
        for request_id in replica.finished:
            finished_at[int(request_id)] = replica.now
        if replica.is_busy:
            heapq.heapreplace(free_at, (replica.plans_at, index))
        else:
            heapq.heappop(free_at)
        if replica.finished:
            num_finished += len(replica.finished)
            fleet.note(now, num_accepted - num_finished)
            on_progress(num_finished)
            hand_out(replica.now)

    end = float(np.nanmax(finished_at)) if num_finished else 0.0
    replicas, replica_seconds = fleet.replicas, fleet.seconds(end)
    return Outcome(
        first_token_at=first_token_at,
        finished_at=finished_at,
        num_output_tokens=num_output_tokens,
        stats=EngineStats.total([replica.stats for replica in replicas]),
        end=end,
        kv_cache_usage_mean=math.fsum(r.usage_seconds for r in replicas) / (replica_seconds or 1),
        kv_cache_usage_max=max(r.most_usage for r in replicas),
        busy_share=math.fsum(r.busy_s for r in replicas) / (replica_seconds or 1),
        replica_seconds=replica_seconds,
        max_replicas=fleet.max_replicas,
    )


class _Fleet:
    """The replicas of all times, and when each was paid for. Without an autoscaler they are there
    from the beginning to the end."""

    def __init__(
        self,
        config: EngineConfig,
        deployment: Deployment,
        num_replicas: int,
        autoscaler: Autoscaler | None,
        startup_s: float,
    ):
        self._make = lambda: _Replica(config, deployment)
        self.replicas = [self._make() for _ in range(num_replicas)]
        self._autoscaler = autoscaler
        self._startup_s = startup_s
        self.now = 0.0  # of the latest decision
        self._next_look = 0.0
        self._wanted = list(range(num_replicas))  # those that run or start, in order of age
        self._taking = list(self._wanted)
        self._ready_at = [0.0] * num_replicas
        self._began_at = [0.0] * num_replicas
        self._usage_seen = [0.0] * num_replicas
        self._left: dict[int, float] = {}  # when one was told to finish its requests and end
        self.max_replicas = num_replicas

    def scales_before(self, now: float) -> bool:
        return self._autoscaler is not None and self._next_look <= now

    def note(self, now: float, num_ongoing: int) -> None:
        if self._autoscaler is not None:
            self._autoscaler.note(now, num_ongoing)

    def scale(self) -> list[int]:
        """Start replicas or let some end, and return those that take requests."""
        assert self._autoscaler is not None
        now = self.now = self._next_look
        self._next_look += EVERY_S
        running = self._running(now)
        self._autoscaler.note_usage(self._usage_since(running))
        target = self._autoscaler.decide(now, len(running))
        while len(self._wanted) < target:
            self._wanted.append(len(self.replicas))
            self.replicas.append(self._make())
            self._began_at.append(now)
            self._ready_at.append(now + self._startup_s)
        for index in self._wanted[target:]:
            self._left[index] = now
        del self._wanted[target:]
        num_ending = sum(self.replicas[index].is_busy for index in self._left)
        self.max_replicas = max(self.max_replicas, len(self._wanted) + num_ending)
        self._taking = self._running(now)
        return self._taking

    def _usage_since(self, running: list[int]) -> float:
        """The use of the caches of these replicas, over the time since the last call."""
        self._usage_seen += [0.0] * (len(self.replicas) - len(self._usage_seen))
        used = 0.0
        for index in running:
            now = self.replicas[index].usage_seconds
            used += now - self._usage_seen[index]
            self._usage_seen[index] = now
        return used

    def has_room(self, limit: int | None) -> bool:
        return limit is None or any(self.is_free(index, limit) for index in self._taking)

    def is_free(self, index: int, limit: int | None) -> bool:
        return limit is None or self.replicas[index].num_ongoing < limit

    def seconds(self, end: float) -> float:
        """The time of all replicas. One that was told to end is there until its last token."""
        return math.fsum(
            max(self._left.get(i, end), min(self.replicas[i].now, end)) - began
            for i, began in enumerate(self._began_at)
            if began < end
        )

    def _running(self, now: float) -> list[int]:
        return [index for index in self._wanted if self._ready_at[index] <= now]


class _Replica:
    """An engine core on simulated devices."""

    def __init__(self, config: EngineConfig, deployment: Deployment):
        self._executor = SimulatedExecutor(
            deployment.info,
            deployment.buckets,
            deployment.step_time,
            deployment.host_s_per_step,
            deployment.host_memory,
        )
        self._core = EngineCore(config, self._executor, clock=lambda: self._executor.now)
        self.is_busy = False
        self.num_ongoing = 0
        self.plans_at = 0.0  # when the host plans the next step
        self.finished: list[str] = []  # by the last step; the router learns of them at its end
        self.usage_seconds = 0.0  # of the KV cache, over time
        self.most_usage = 0.0

    @property
    def now(self) -> float:
        """The time when the host has the tokens of the previous step."""
        return self._executor.now

    @property
    def busy_s(self) -> float:
        return self._executor.busy_s

    @property
    def stats(self) -> EngineStats:
        return self._core.stats()

    def take(self, request: EngineRequest, now: float) -> bool:
        """Add a request; return whether the replica was idle."""
        self._core.add_request(request)
        self.num_ongoing += 1
        if self.is_busy:
            return False
        self.is_busy = True
        self._executor.now = self.plans_at = max(self._executor.now, now)
        return True

    def step(self) -> tuple[list[str], list[str]]:
        """Run a step; return the requests that got their first token, and those that ended. Without
        work, become idle."""
        if not self._core.has_work():
            self.is_busy = False
            return [], []
        before = self.now
        self._executor.now = self.plans_at
        begun, finished = [], []
        outputs = self._core.step()
        self._executor.handle_tokens()
        for output in outputs:
            if output.stats is None:
                continue  # no request has begun or ended
            if output.finish_reason is not None:
                finished.append(output.request_id)
                self.num_ongoing -= 1
            if output.stats.first_token_ts == output.stats.last_token_ts:
                begun.append(output.request_id)
        self.plans_at = self._find_time_to_plan()
        usage = self._core.kv_cache_usage
        self.usage_seconds += usage * (self.now - before)
        self.most_usage = max(self.most_usage, usage)
        return begun, finished

    def _find_time_to_plan(self) -> float:
        """The latest moment to plan. Like an engine's loop, this checks for the step's end at
        intervals."""
        executor, now = self._executor, self.now
        while (spare_s := self._core.spare_s) > 0:
            executor.now += min(spare_s, LOOK_S)
        found, executor.now = executor.now, now
        return found
