"""Plans each step and takes its results in: the state machine at the heart of the engine.

There is no prefill or decode phase. Every request has tokens computed and tokens wanted, and a
step hands out its token budget: first to the running requests, in policy order, then to waiting
ones. Chunked prefill, mixed batches, prefix hits and resumption after preemption all follow.

The engine core calls `schedule`, dispatches what it returns, and later calls `update` (or `fail`)
with what came back, in the order of dispatch. `schedule` may be called again before: a sampled
token that is still on the device is counted, and scheduled as CARRIED_TOKEN. That the token ends
its request is then found out one step late, and the row dispatched in between is dropped. Slot and
blocks of a finished request are free at once nevertheless, see `kv.manager`.

Not thread safe; the cost of a step depends on its rows, never on how many requests wait or have
finished.
"""

import bisect
import time
from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from jaxllm.errors import ValidationError
from jaxllm.logging import init_logger
from jaxllm.messages import EngineOutput, EngineRequest, FinishReason
from jaxllm.metrics.stats import EngineStats
from jaxllm.scheduler import invariants
from jaxllm.scheduler.corruption import CORRUPTED, corrupted_rows
from jaxllm.scheduler.draft import PromptSpan, StepDraft
from jaxllm.scheduler.kv.manager import KVCacheManager
from jaxllm.scheduler.lanes import Lanes
from jaxllm.scheduler.limits import make_limits
from jaxllm.scheduler.logprobs import prompt_logprobs, row_logprobs
from jaxllm.scheduler.policy import SchedulingPolicy, checked_key, fcfs
from jaxllm.scheduler.request import NO_LANE, Request, RequestStatus
from jaxllm.scheduler.schedule import Schedule, StepResult
from jaxllm.scheduler.waiting_queue import WaitingQueue

logger = init_logger(__name__)


class _Dispatched(NamedTuple):
    """A step on its way. The requests themselves, since a slot or an id may be reused before the
    step comes back."""

    schedule: Schedule
    rows: list[Request | None]  # None: what comes back is of no use
    prompt_spans: list[PromptSpan]


class Scheduler:
    """Owns every unfinished request."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        kv: KVCacheManager,
        lanes: Lanes | None = None,
        policy: SchedulingPolicy = fcfs,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        stats: EngineStats | None = None,
        check_invariants: bool = False,
    ) -> None:
        # Or else the longest prompts would never run; the plan refuses that.
        assert enable_chunked_prefill or max_num_batched_tokens >= max_model_len, (
            f"{max_num_batched_tokens=} is below {max_model_len=}"
        )
        # A request that has the pools to itself always fits. This is why nothing can deadlock.
        for group in kv.groups:
            assert group.num_blocks >= group.max_blocks_per_request, (
                f"{group} does not hold one request of max_model_len={max_model_len}"
            )
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._kv = kv
        self._lanes = lanes
        self._policy = policy
        self._limits = make_limits(
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
        )
        self._check_invariants = check_invariants
        self.stats = stats if stats is not None else EngineStats()
        self.stats.group_blocks = [group.num_blocks for group in kv.groups]
        self.stats.group_blocks_used = kv.num_blocks_used

        self._requests: dict[str, Request] = {}  # all unfinished ones
        self._running: list[Request] = []  # in policy order
        self._waiting = WaitingQueue()
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))  # taken from the end
        self._dispatched: deque[_Dispatched] = deque()
        self._num_arrivals = 0
        self._num_steps = 0

    # ---- requests come and go

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self._running)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def add_request(self, message: EngineRequest) -> None:
        """Take a validated request in."""
        if message.request_id in self._requests:
            raise ValidationError(
                f"request_id={message.request_id!r} belongs to a request that has not finished; "
                "use another id or wait for that one to end",
                parameter="request_id",
                value=message.request_id,
            )
        request = Request(message, hash_root=self._kv.hash_root(message.cache_salt))
        assert 0 < request.num_prompt_tokens, f"{request}: empty prompt"
        assert 0 < message.max_tokens, f"{request}: max_tokens={message.max_tokens}"
        assert request.max_num_tokens <= self._max_model_len, (
            f"{request}: {request.max_num_tokens} tokens exceed {self._max_model_len}"
        )
        request.order = (*checked_key(self._policy, request), self._num_arrivals)
        self._num_arrivals += 1
        request.stats.queued_ts = time.monotonic()
        leader = self._requests.get(message.prefix_leader_id or "")
        self._requests[request.request_id] = request
        if leader is not None:
            self._kv.let_share(leader, request)
        if leader is not None and leader.num_computed_tokens < leader.num_prompt_tokens:
            request.status = RequestStatus.PARKED
            leader.followers.append(request)
        else:
            self._waiting.push(request)
        self._settle()

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """End requests now. Ids that are unknown, or finished already, are ignored."""
        found = map(self._requests.get, request_ids)
        return self._end_all((one for one in found if one is not None), FinishReason.ABORT)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing happens, while a request holds blocks."""
        return self._kv.reset()

    # ---- planning a step

    def schedule(self) -> Schedule | None:
        """Plan the next step, or return None if no request can compute a token now."""
        draft = StepDraft()
        budget, preempted = self._schedule_running(draft, self._max_num_batched_tokens)
        # What was just freed goes to those who were short of it, not to newcomers.
        if not preempted:
            budget = self._schedule_waiting(draft, budget)
        rows = draft.rows
        if not rows and preempted:
            return self.schedule()  # a lane that had to go leaves its room to the next
        if not rows:
            assert self._dispatched or not self._requests, (
                f"{len(self._requests)} unfinished requests, and none of them can ever run"
            )
            self._settle()
            return None
        if self._lanes is not None:
            draft.carried_from = self._lanes.carried_from(rows)
        schedule, spans = draft.build(self._num_steps, rows)
        self._num_steps += 1
        self._dispatched.append(_Dispatched(schedule, [*rows], spans))
        self._advance(rows)
        if self._lanes is not None:
            self._lanes.dispatch(schedule.step, rows)
        self.stats.count_step(schedule.total_tokens)
        self._settle()
        return schedule

    def _schedule_running(self, draft: StepDraft, budget: int) -> tuple[int, bool]:
        """Serve running requests. Return the budget left, and whether one was preempted."""
        num_running = len(self._running)
        running = self._running if self._lanes is None else self._lanes.take_turn(self._running)
        add_decode = draft.decodes.append
        index = 0
        while index < len(running) and budget:
            request = running[index]
            index += 1
            num_tokens, num_computed = request.num_tokens, request.num_computed_tokens
            if num_tokens == request.max_num_tokens:
                continue  # its last token is in flight
            n = num_tokens - num_computed
            if n > 1:
                n = self._limit(request, n, budget)
                if n == 0:
                    continue
            if num_computed + n > request.room:
                if not self._make_room(request, num_computed + n, running):
                    break
                draft.add_blocks(request)
            request.num_computed_tokens = num_computed + n
            budget -= n
            if n == 1:
                add_decode(request)
            else:
                draft.add_row(request, n)
            if num_computed < request.num_prompt_tokens:
                self.stats.num_prompt_tokens += request.count_prompt_tokens(n)
        return budget, len(self._running) < num_running

    def _make_room(self, request: Request, num_tokens: int, served: list[Request]) -> bool:
        """Give a running request blocks for so many tokens, if need be by preempting those served
        last.

        Running requests are served in order, so no victim is in this step already. False if the
        request itself was the last one and had to go.
        """
        while not self._kv.extend(request, num_tokens):
            victim = self._running.pop()
            if served and served[-1] is victim:  # another list, with lanes
                served.pop()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Send a running request back to wait. It computes its tokens anew, except for those
        whose blocks are still cached when it returns."""
        self._give_back(request)
        request.num_computed_tokens = 0
        request.stats.num_preemptions += 1
        request.has_new_stats = True
        self.stats.num_preemptions += 1
        if request.num_in_flight:
            request.status = RequestStatus.PARKED  # until `update` brings the token
        else:
            request.status = RequestStatus.WAITING
            self._waiting.push(request)

    def _schedule_waiting(self, draft: StepDraft, budget: int) -> int:
        """Admit waiting requests in policy order, as far as budget, slots and blocks go.

        The first that does not fit ends the round: nobody overtakes it, so it cannot starve.
        """
        while budget and self._free_slots:
            request = self._waiting.peek()
            if request is None:
                break
            prefix = self._kv.find_prefix(request)
            num_cached = prefix * self._kv.block_size
            n = self._limit(request, request.num_tokens - num_cached, budget)
            # One block in reserve for each running request, or else the newcomer would soon be
            # preempted by one that grows.
            if n == 0 or not self._kv.admit(request, prefix, reserve=len(self._running)):
                break
            self._waiting.pop()
            request.status = RequestStatus.RUNNING
            request.slot = self._free_slots.pop()
            bisect.insort(self._running, request, key=attrgetter("order"))
            if not request.stats.scheduled_ts:
                request.stats.scheduled_ts = time.monotonic()
                request.num_cached_tokens = num_cached
                self.stats.prefix_cache_hits += num_cached
                if self._kv.may_read(request):
                    self.stats.prefix_cache_queries += request.num_tokens
            request.num_computed_tokens = num_cached + n
            budget -= n
            draft.admit(request, num_cached)
            draft.add_row(request, n)
            self.stats.num_prompt_tokens += request.count_prompt_tokens(n)
        return budget

    def _limit(self, request: Request, n: int, budget: int) -> int:
        for limit in self._limits:
            n = limit(request, n, budget)
        return n

    def _advance(self, rows: list[Request]) -> None:
        """Count what the step samples, and let others share what it computes."""
        for request in rows:
            num_computed = request.num_computed_tokens
            if num_computed == request.num_tokens:
                request.num_tokens += 1
            if num_computed >= request.next_block_at:
                self._kv.advance(request)
            if request.followers and num_computed >= request.num_prompt_tokens:
                self._release_followers(request)

    # ---- taking results in

    def update(self, schedule: Schedule, result: StepResult) -> list[EngineOutput]:
        """Take in what the oldest dispatched step brought; return what is new for whom."""
        step = self._take_oldest(schedule)
        now = time.monotonic()
        prompt_parts = prompt_logprobs(result, step.rows, step.prompt_spans)
        corrupted = corrupted_rows(schedule, result, step.prompt_spans)
        num_new_tokens = 0
        any_finished = False
        wants_logprobs = schedule.wants_logprobs
        finished, parked = RequestStatus.FINISHED, RequestStatus.PARKED
        outputs: list[EngineOutput] = []
        token_ids = result.token_ids[: len(step.rows)].tolist()
        for row, (request, samples, token) in enumerate(
            zip(step.rows, schedule.samples.tolist(), token_ids, strict=True)
        ):
            if request is None or request.status is finished:
                continue  # it ended, or started over, after this row had been dispatched
            if row in corrupted:
                outputs += self._end_corrupted(request)
                any_finished = True
                continue
            if not samples:
                if row in prompt_parts:
                    outputs.append(
                        EngineOutput(
                            request_id=request.request_id, new_prompt_logprobs=prompt_parts[row]
                        )
                    )
                continue
            request.output_token_ids.append(token)
            num_new_tokens += 1
            stats = request.stats
            stats.last_token_ts = now
            output = EngineOutput(
                request_id=request.request_id,
                new_token_ids=[token],
                num_cached_tokens=request.num_cached_tokens,
            )
            outputs.append(output)
            if request.has_new_stats:
                stats.first_token_ts = stats.first_token_ts or now
                output.stats = request.report_stats()
            if wants_logprobs and request.sampling_params.logprobs is not None:
                assert result.logprobs is not None, f"step {schedule.step} brought no logprobs"
                logits = None if result.logits is None else result.logits[row]
                output.new_logprobs = [
                    row_logprobs(result.logprobs, row, request.sampling_params.logprobs, logits)
                ]
            if prompt_parts:
                output.new_prompt_logprobs = prompt_parts.get(row)
            finish = request.finish_after(token)
            if finish is not None:
                output.finish_reason, output.stop_reason = finish
                output.stats = request.report_stats()
                self._finish(request)
                any_finished = True
            elif request.status is parked and not request.num_in_flight:
                request.status = RequestStatus.WAITING
                self._waiting.push(request)
        self.stats.num_generation_tokens += num_new_tokens
        if any_finished:
            self._drop_finished()
        else:
            self._settle()
        return outputs

    def fail(self, schedule: Schedule, message: str) -> list[EngineOutput]:
        """End the requests of the oldest dispatched step, which did not run.

        Steps dispatched after it read the KV and the tokens that it should have written, so their
        requests end too. Nothing that any of them may have filled can be found again.
        """
        step = self._take_oldest(schedule)
        outputs = []
        touched = [request for later in (step, *self._dispatched) for request in later.rows]
        for request in filter(None, touched):
            if not request.is_finished:
                outputs.append(self._end(request, FinishReason.ERROR, error=message))
            self._kv.forget(request)
        self._drop_finished()
        return outputs

    def _take_oldest(self, schedule: Schedule) -> _Dispatched:
        step = self._dispatched.popleft()
        assert step.schedule is schedule, (
            f"step {schedule.step} came back, step {step.schedule.step} is the oldest"
        )
        return step

    def end_all(self, reason: FinishReason, error: str | None = None) -> list[EngineOutput]:
        """End every request that there is."""
        return self._end_all(list(self._requests.values()), reason, error)

    def restart(self) -> None:
        """Let all running requests start over, and forget every prefix: the device's KV cache is
        lost. No step may be on its way."""
        assert not self._dispatched, f"{len(self._dispatched)} steps are on their way"
        while self._running:
            self._preempt(self._running.pop())
        forgotten = self._kv.reset()
        assert forgotten, "blocks are in use, and no request runs"
        self._settle()

    # ---- ends

    def _end_all(
        self, requests: Iterable[Request], reason: FinishReason, error: str | None = None
    ) -> list[EngineOutput]:
        outputs = [self._end(request, reason, error) for request in requests]
        self._drop_finished()
        return outputs

    def _end(
        self, request: Request, reason: FinishReason, error: str | None = None
    ) -> EngineOutput:
        """Finish a request from outside, not because of a token."""
        self._finish(request)
        return EngineOutput(
            request_id=request.request_id,
            finish_reason=reason,
            num_cached_tokens=request.num_cached_tokens,
            stats=request.report_stats(),
            error=error,
        )

    def _end_corrupted(self, request: Request) -> list[EngineOutput]:
        """Finish a request whose logits are not finite, or let it start over if blocks that it has
        taken over may be the cause. No other request finds its blocks any more."""
        self._kv.forget(request)
        if request.has_taken_over_blocks and request.hash_root is not None:
            self._start_over(request)
            return []
        if not self.stats.num_requests_corrupted:
            logger.error("%s ended: %s. More are only counted.", request.request_id, CORRUPTED)
        self.stats.num_requests_corrupted += 1
        request.stats.is_corrupted = True
        output = self._end(request, FinishReason.ERROR, CORRUPTED)
        self._kv.forget(request)  # what its end has registered
        return [output]

    def _start_over(self, request: Request) -> None:
        """Compute a request anew, in blocks of its own; `_drop_finished` must follow. The results
        of its rows in steps under way are dropped."""
        for step in self._dispatched:
            step.rows[:] = [None if row is request else row for row in step.rows]
        request.hash_root = None
        request.num_tokens = request.num_known_tokens
        if request.status is RequestStatus.RUNNING:
            self._preempt(request)
        else:  # preempted before, it waited for this token
            request.status = RequestStatus.WAITING
            self._waiting.push(request)

    def _finish(self, request: Request) -> None:
        """Let go of a request; `_drop_finished` must follow."""
        status = request.status
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]
        if status is RequestStatus.RUNNING:
            self._give_back(request)
        elif status is RequestStatus.WAITING:
            self._waiting.forget_finished()
        if request.followers:
            self._release_followers(request)
        self.stats.num_requests_finished += 1

    def _drop_finished(self) -> None:
        self._running = [r for r in self._running if r.status is RequestStatus.RUNNING]
        self._settle()

    def _give_back(self, request: Request) -> None:
        """Take slot and blocks from a request that ran."""
        self._kv.free(request)
        self._free_slots.append(request.slot)
        request.slot, request.lane = -1, NO_LANE

    def _release_followers(self, leader: Request) -> None:
        for follower in leader.followers:
            if not follower.is_finished:
                follower.status = RequestStatus.WAITING
                self._waiting.push(follower)
        leader.followers = []

    # ---- bookkeeping

    def _settle(self) -> None:
        """Bring the gauges up to date, and check that all is well if that was asked for."""
        stats = self.stats
        stats.num_requests_running = self.num_running
        stats.num_requests_waiting = self.num_waiting
        stats.num_requests_deferred = self.num_waiting - len(self._waiting)
        stats.group_blocks_used = self._kv.num_blocks_used
        if self._check_invariants:
            self.check()

    def check(self) -> None:
        """Assert that nothing is lost, doubled or over its limit. Looks at everything."""
        invariants.check(
            requests=self._requests,
            running=self._running,
            waiting=self._waiting,
            dispatched=self._dispatched,
            free_slots=self._free_slots,
            kv=self._kv,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens,
        )
