"""Where every request is: in the waiting queue, parked, or running with a slot and blocks.

Only this module moves requests between these places. The cost of a move does not depend on how many
requests wait.
"""

import bisect
import time
from collections.abc import Iterable, Sequence
from operator import attrgetter

from jaxllm.messages import EngineOutput, FinishReason
from jaxllm.metrics.stats import EngineStats
from jaxllm.scheduler.features import Feature, Gate
from jaxllm.scheduler.kv.host_tier import HostTier
from jaxllm.scheduler.kv.manager import KVCacheManager
from jaxllm.scheduler.request import NO_LANE, Request, RequestStatus
from jaxllm.scheduler.waiting_queue import WaitingQueue


class Places:
    """Every unfinished request, in exactly one place."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        kv: KVCacheManager,
        features: Sequence[Feature],
        stats: EngineStats,
        gate: Gate | None = None,
    ) -> None:
        self.requests: dict[str, Request] = {}  # all unfinished requests
        self.running: list[Request] = []  # in policy order
        self.waiting = WaitingQueue()
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))  # the last is taken first
        self._kv = kv
        self._features = features
        self._gate = gate  # one of the features
        self._stats = stats

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - len(self.running)

    def add(self, request: Request, prefix_leader_id: str | None) -> None:
        """Put a new request in the waiting queue; park it while its leader's prompt has not been
        dispatched, or a feature holds it."""
        # Nobody waits for a leader of which nothing can be shared.
        leader = self.requests.get(prefix_leader_id or "") if self._kv.can_share else None
        self.requests[request.request_id] = request
        for feature in self._features:
            feature.add(request)
        if leader is not None:
            self._kv.let_share(leader, request)
        if leader is not None and leader.num_computed_tokens < leader.num_prompt_tokens:
            request.num_holds += 1
            leader.followers.append(request)
        if request.num_holds:
            self._move(request, RequestStatus.PARKED)
        else:
            self.waiting.push(request)

    def release(self, request: Request) -> None:
        """Take one hold from a new request."""
        request.num_holds -= 1
        if not request.num_holds and not request.is_finished:
            self.wait(request)

    def admit_first(self, num_cached: int) -> None:
        """Let the first waiting request run. It already has its blocks, where `num_cached` of its
        tokens need not be computed."""
        request = self.waiting.pop()
        self._move(request, RequestStatus.RUNNING)
        request.slot = self.free_slots.pop()
        bisect.insort(self.running, request, key=attrgetter("order"))
        if not request.stats.scheduled_ts:
            request.stats.scheduled_ts = time.monotonic()
            request.num_cached_tokens = num_cached
            self._count_cached(request)

    def _count_cached(self, request: Request) -> None:
        """Count what a request has found that runs for the first time."""
        stats, num_cached = self._stats, request.num_cached_tokens
        stats.prefix_cache_hits += num_cached
        stats.num_images += len(request.images)
        if not self._kv.may_read(request):
            return
        stats.prefix_cache_queries += request.num_tokens
        if self._kv.tier is not None:
            found = request.num_loaded_blocks * self._kv.block_size
            stats.external_cache_hits += found
            stats.external_cache_queries += request.num_tokens - num_cached + found

    def hold_first(self) -> None:
        """Park the first waiting request, which the gate holds."""
        self._move(self.waiting.pop(), RequestStatus.PARKED)

    def wait(self, request: Request) -> None:
        """Put a request that was parked, or that ran, in the waiting queue."""
        is_swapped = self._kv.tier is not None and request.stats.num_preemptions > 0
        self._move(request, RequestStatus.SWAPPED if is_swapped else RequestStatus.WAITING)
        self.waiting.push(request)

    def preempt(self, request: Request) -> None:
        """Take slot and blocks from a running request; the caller takes it out of `running`. When
        it runs again it computes its tokens again, except those whose blocks are still cached."""
        self._give_back(request)
        request.num_computed_tokens = request.num_proposed = request.num_draft_read = 0
        request.num_drafts = 0
        request.stats.num_preemptions += 1
        request.has_new_stats = True
        self._stats.num_preemptions += 1
        if request.num_in_flight:
            self._move(request, RequestStatus.PARKED)  # until its token arrives
        else:
            self.wait(request)

    def release_followers(self, leader: Request) -> None:
        for follower in leader.followers:
            self.release(follower)
        leader.followers = []

    def end_all(
        self, requests: Iterable[Request], reason: FinishReason, error: str | None = None
    ) -> list[EngineOutput]:
        """Finish requests for a reason other than a token."""
        outputs = [self.end(request, reason, error) for request in requests]
        self.drop_finished()
        return outputs

    def end(self, request: Request, reason: FinishReason, error: str | None = None) -> EngineOutput:
        """Finish a request for a reason other than a token; `drop_finished` must follow."""
        self.finish(request)
        return EngineOutput(
            request_id=request.request_id,
            finish_reason=reason,
            num_cached_tokens=request.num_cached_tokens,
            stats=request.report_stats(),
            error=error,
        )

    def finish(self, request: Request) -> None:
        """Finish a request and free what it holds; `drop_finished` must follow."""
        status = request.status
        self._move(request, RequestStatus.FINISHED)
        del self.requests[request.request_id]
        if status is RequestStatus.RUNNING:
            self._give_back(request)
        elif status in (RequestStatus.WAITING, RequestStatus.SWAPPED):
            self.waiting.forget_finished()
        if request.followers:
            self.release_followers(request)
        for feature in self._features:
            feature.drop(request)
        self._stats.num_requests_finished += 1

    def drop_finished(self) -> None:
        """Remove the requests that no longer run from `running`."""
        self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]

    def count(self) -> None:
        """Update the gauges."""
        stats = self._stats
        stats.num_requests_running = len(self.running)
        stats.num_requests_waiting = self.num_waiting
        stats.num_requests_deferred = self.num_waiting - len(self.waiting)
        stats.group_blocks_used = self._kv.num_blocks_used
        stats.group_shortages = [*self._kv.num_shortages]
        if (snapshots := self._kv.snapshots) is not None:
            stats.num_snapshots = snapshots.sizes.count
            stats.num_snapshots_used = snapshots.num_used
        if self._kv.tier is not None:
            self._count_tier(self._kv.tier)

    def _count_tier(self, tier: HostTier) -> None:
        stats = self._stats
        stats.host_blocks, stats.host_blocks_used = tier.num_places, tier.num_used
        stats.host_blocks_stored, stats.host_blocks_loaded = tier.num_stored, tier.num_loaded
        stats.host_blocks_read, stats.host_blocks_dropped = tier.num_read, tier.num_dropped
        stats.blocks_taken, stats.blocks_not_taken = tier.num_taken, tier.num_not_taken

    def _move(self, request: Request, status: RequestStatus) -> None:
        swapped = RequestStatus.SWAPPED
        self._stats.num_requests_swapped += (status is swapped) - (request.status is swapped)
        request.status = status

    def _give_back(self, request: Request) -> None:
        """Take slot and blocks from a request that ran."""
        self._kv.free(request)
        if self._gate is not None:
            self._gate.left(request)
        self.free_slots.append(request.slot)
        request.slot, request.lane = -1, NO_LANE
