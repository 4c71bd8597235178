"""Asserts that the scheduler's bookkeeping adds up: nothing is lost, doubled or over its limit.

The check visits every request and every block, so it runs only with `check_invariants`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from jaxllm.scheduler.kv.manager import KVCacheManager
from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.scheduler.schedule import Schedule
from jaxllm.scheduler.waiting_queue import WaitingQueue


class DispatchedStep(Protocol):
    """A step in flight, and the requests of its rows."""

    @property
    def schedule(self) -> Schedule: ...
    @property
    def rows(self) -> list[Request | None]: ...


def check(
    *,
    requests: Mapping[str, Request],
    running: Sequence[Request],
    waiting: WaitingQueue,
    dispatched: Iterable[DispatchedStep],
    free_slots: list[int],
    kv: KVCacheManager,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> None:
    """Assert the invariants that hold between any two calls of a scheduler."""
    kv.check(running)
    slots = [request.slot for request in running]
    assert sorted(slots + free_slots) == list(range(max_num_seqs)), "slots"
    assert [r.order for r in running] == sorted(r.order for r in running), "policy order"
    _check_places(requests, running, waiting)

    in_flight: Counter[int] = Counter()
    uncertain: Counter[int] = Counter()
    for step in dispatched:
        assert 0 < step.schedule.total_tokens <= max_num_batched_tokens, "budget"
        assert step.schedule.num_rows <= max_num_seqs, "rows"
        drafts = step.schedule.num_drafts
        for row, (request, samples) in enumerate(
            zip(step.rows, step.schedule.samples, strict=True)
        ):
            num_drafts = 0 if drafts is None else int(drafts[row])
            in_flight[id(request)] += bool(samples) + num_drafts  # that of None is never read
            uncertain[id(request)] += num_drafts
    for r in requests.values():
        settled, refused = r.settled or (0, 0)
        uncertain[id(r)] -= settled
        in_flight[id(r)] -= refused
        if r.forced:
            in_flight[id(r)] += len(r.forced) - 1 - settled + refused
        assert r.num_in_flight == in_flight[id(r)], f"{r}: {in_flight[id(r)]} in flight"
        assert r.num_uncertain == uncertain[id(r)], f"{r}: {uncertain[id(r)]} uncertain"
        assert r.num_known_tokens <= r.num_tokens <= r.max_num_tokens, r
        assert r.num_computed_tokens <= r.room, r
        assert r.status is RequestStatus.RUNNING or not r.tables and r.slot < 0, r


def _check_places(
    requests: Mapping[str, Request], running: Sequence[Request], waiting: WaitingQueue
) -> None:
    """Assert that every request is in exactly one place, and that its status names this place."""
    queued = waiting.requests()
    followers = [f for r in requests.values() for f in r.followers if not f.is_finished]
    assert all(f.num_holds for f in followers), "a follower is not held"
    held = [r for r in requests.values() if r.num_holds]
    late = [r for r in requests.values() if r.status is RequestStatus.PARKED and r.num_in_flight]
    places = Counter(map(id, [*running, *queued, *held, *late]))
    assert places == Counter(map(id, requests.values())), "a request is not in one place"
    for status, there in (
        (RequestStatus.RUNNING, running),
        (RequestStatus.WAITING, [r for r in queued if r.status is not RequestStatus.SWAPPED]),
        (RequestStatus.PARKED, held + late),
    ):
        assert all(request.status is status for request in there), status
    assert len(waiting) == len(queued), "waiting count"
