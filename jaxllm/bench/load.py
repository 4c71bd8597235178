"""Generates the load of a run: sends each request at its time, with limited concurrency."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.bench.arrivals import arrival_times, ramp_times
from jaxllm.bench.client import OpenAIClient
from jaxllm.bench.datasets import BenchRequest
from jaxllm.bench.figures import Outcome
from jaxllm.bench.options import LoadOptions
from jaxllm.errors import JaxLLMError, UnauthorizedError

_RETRY_S = 1.0


class Run(NamedTuple):
    """The outcome of each request, in their order, and the duration of the whole run."""

    outcomes: list[Outcome]
    duration: float


async def run_load(
    client: OpenAIClient,
    requests: Sequence[BenchRequest],
    times: Sequence[float],
    max_concurrency: int | None = None,
    on_end: Callable[[], object] = lambda: None,
) -> Run:
    """Send every request at its time (in seconds from now) and wait until all have ended.

    A request above `max_concurrency` waits. Its latency counts from when it is sent.
    """
    turns = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    start = time.perf_counter()

    async def one(request: BenchRequest, at: float) -> Outcome:
        wait = start + at - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        async with turns:
            outcome = await client.send(request, start)
        on_end()
        return outcome

    outcomes = await asyncio.gather(*map(one, requests, times))
    return Run(outcomes, max(o.start + o.latency for o in outcomes))


def send_times(options: LoadOptions, num_requests: int, seed: int) -> list[float]:
    """The times at which requests are sent, in seconds from the start."""
    rng = np.random.default_rng(seed)
    if options.ramp_up_strategy is None:
        return arrival_times(num_requests, options.request_rate, options.burstiness, rng).tolist()
    assert options.ramp_up_start_rps and options.ramp_up_end_rps, "validated"
    return ramp_times(
        num_requests,
        options.ramp_up_strategy,
        options.ramp_up_start_rps,
        options.ramp_up_end_rps,
        options.burstiness,
        rng,
    ).tolist()


async def warm_up(
    client: OpenAIClient, requests: Sequence[BenchRequest], options: LoadOptions
) -> None:
    """Retry the first request until the server answers it or the time is over. Then send the first
    requests `num_warmups` times. Nothing of this is measured."""
    deadline = time.perf_counter() + options.ready_check_timeout_sec
    while (tried := await client.send(requests[0], 0.0)).has_failed:
        if tried.error.startswith("status 401:"):
            raise UnauthorizedError(tried.error)
        if time.perf_counter() >= deadline:
            raise JaxLLMError(f"the first request, which is a trial, failed: {tried.error}")
        await asyncio.sleep(_RETRY_S)
    some = [requests[i % len(requests)] for i in range(options.num_warmups)]
    if some:
        run = await run_load(client, some, [0.0] * len(some), options.max_concurrency)
        failed = [outcome.error for outcome in run.outcomes if outcome.has_failed]
        if failed:
            raise JaxLLMError(f"{len(failed)} warm-up requests failed: {failed[0]}")
