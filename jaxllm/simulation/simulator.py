"""Simulates replicas that serve a trace, event by event, with the real engine core of each.

An event is the arrival of a request, or a replica whose host can plan its next step. Events are
processed in the order of their time, so the router sees at each moment what a real one would see.
The frontend, the network and failures are not simulated.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.engine.pace import LOOK_S
from jaxllm.engine.router import Router
from jaxllm.messages import EngineRequest
from jaxllm.metrics.stats import EngineStats
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


def simulate(
    trace: Trace,
    deployment: Deployment,
    num_replicas: int,
    *,
    scheduling_policy: str = "fcfs",
    async_scheduling: bool = True,
    long_prefill_token_threshold: int = 0,
    enable_prefix_caching: bool = True,
    on_progress: Callable[[int], None] = lambda num_finished: None,
) -> Outcome:
    """Simulate serving a trace."""
    config = EngineConfig.create(
        deployment.info.model,
        pipeline_parallel_size=deployment.step_time.num_stages,
        scheduling_policy=scheduling_policy,
        async_scheduling=async_scheduling,
        long_prefill_token_threshold=long_prefill_token_threshold,
        enable_prefix_caching=enable_prefix_caching,
    )
    replicas = [_Replica(config, deployment) for _ in range(num_replicas)]
    router = Router(range(num_replicas))
    first_token_at = np.full(len(trace), np.nan)
    finished_at = np.full(len(trace), np.nan)
    num_output_tokens = np.zeros(len(trace), np.int64)

    arrivals: list[float] = trace.arrivals.tolist()
    free_at: list[tuple[float, int]] = []  # a heap of the replicas with work
    num_arrived = num_finished = 0
    while num_arrived < len(arrivals) or free_at:
        if num_arrived < len(arrivals) and (not free_at or arrivals[num_arrived] <= free_at[0][0]):
            request = trace.request(num_arrived, deployment.info.max_model_len)
            now = arrivals[num_arrived]
            num_arrived += 1
            if request is None:
                continue
            chosen = router.choose(request)
            num_output_tokens[num_arrived - 1] = request.max_tokens
            if replicas[chosen].take(request, now):
                heapq.heappush(free_at, (replicas[chosen].plans_at, chosen))
            continue
        _, index = free_at[0]
        replica = replicas[index]
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
            on_progress(num_finished)

    end = float(np.nanmax(finished_at)) if num_finished else 0.0
    return Outcome(
        first_token_at=first_token_at,
        finished_at=finished_at,
        num_output_tokens=num_output_tokens,
        stats=EngineStats.total([replica.stats for replica in replicas]),
        end=end,
        kv_cache_usage_mean=math.fsum(r.usage_seconds for r in replicas)
        / (num_replicas * end or 1),
        kv_cache_usage_max=max(r.most_usage for r in replicas),
        busy_share=math.fsum(r.busy_s for r in replicas) / (num_replicas * end or 1),
    )


class _Replica:
    """An engine core on simulated devices."""

    def __init__(self, config: EngineConfig, deployment: Deployment):
        self._executor = SimulatedExecutor(
            deployment.info,
            deployment.buckets,
            deployment.step_time,
            deployment.host_s_per_step,
        )
        self._core = EngineCore(config, self._executor, clock=lambda: self._executor.now)
        self.is_busy = False
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
