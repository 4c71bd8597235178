"""Plans each step and takes its results in: the state machine at the heart of the engine.

There is no prefill or decode phase. Every request has computed tokens and tokens still to compute.
A step hands out its token budget, first to the running requests in policy order, then to the
waiting ones. Chunked prefill, mixed batches, prefix hits and resumption all follow from this rule.

The engine core calls `schedule`, dispatches the returned step, and later calls `update` (or `fail`)
with its result, in the order of dispatch. It may call `schedule` again before `update`: the
scheduler counts a sampled token that is still on the device, and schedules it as CARRIED_TOKEN. If
that token ends its request, the scheduler learns it one step late, and drops the row dispatched in
between. The slot and blocks of a finished request are free at once nevertheless: see `kv.manager`.

This module plans. `places` says where each request is, and `results` takes the results in.

Not thread safe. The cost of a step depends on its rows, never on how many requests wait or have
finished.
"""

import time
from collections.abc import Iterable, Mapping, Sequence

from jaxllm.errors import ValidationError
from jaxllm.messages import EngineOutput, EngineRequest, FinishReason
from jaxllm.metrics.stats import EngineStats
from jaxllm.scheduler import invariants
from jaxllm.scheduler.draft import StepDraft
from jaxllm.scheduler.features import Feature, Gate
from jaxllm.scheduler.kv.manager import KVCacheManager
from jaxllm.scheduler.lanes import Lanes
from jaxllm.scheduler.limits import make_limits
from jaxllm.scheduler.places import Places
from jaxllm.scheduler.policy import SchedulingPolicy, checked_key, fcfs
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.results import Dispatched, Results
from jaxllm.scheduler.schedule import NO_ADAPTER, Schedule, StepResult
from jaxllm.scheduler.speculation import Drafting
from jaxllm.speculative_config import Speculation


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
        features: Sequence[Feature] = (),
        gate: Gate | None = None,
        speculation: Speculation | None = None,
        pools: bool = False,
        stats: EngineStats | None = None,
        check_invariants: bool = False,
    ) -> None:
        # Without chunks the longest prompt must fit in one step. The plan refuses other configs.
        assert enable_chunked_prefill or max_num_batched_tokens >= max_model_len, (
            f"{max_num_batched_tokens=} is below {max_model_len=}"
        )
        # A request that has the pools to itself always fits, so nothing can deadlock.
        for group in kv.groups:
            assert group.num_blocks >= group.max_blocks_per_request, (
                f"{group} does not hold one request of max_model_len={max_model_len}"
            )
        self._max_num_batched_tokens = max_num_batched_tokens
        # Where requests pool, the one token that stands for their end is never computed.
        self._max_model_len = max_model_len + pools
        self._max_num_seqs = max_num_seqs
        self._kv = kv
        self._lanes = lanes
        self._policy = policy
        if gate is not None:
            features = (*features, gate)
        self._features = features
        self._gate = gate
        self._limits = (
            *(feature.limit for feature in features),
            *make_limits(
                enable_chunked_prefill=enable_chunked_prefill,
                long_prefill_token_threshold=long_prefill_token_threshold,
            ),
        )
        # For which rows are cut; None: they are not.
        self._snapshots = kv.snapshots if enable_chunked_prefill else None
        self._check_invariants = check_invariants
        self.stats = stats if stats is not None else EngineStats()
        self.stats.group_blocks = [group.num_blocks for group in kv.groups]
        self.stats.group_blocks_used = kv.num_blocks_used
        self.stats.group_shortages = [*kv.num_shortages]

        self._places = Places(
            max_num_seqs=max_num_seqs, kv=kv, features=features, stats=self.stats, gate=gate
        )
        self._drafting = None
        self._reads_ahead = speculation is not None and speculation.head is not None
        if speculation is not None:
            assert lanes is None, "a pipeline does not speculate"
            self._drafting = Drafting(
                speculation, kv, self.stats, max_num_batched_tokens=max_num_batched_tokens
            )
        self._results = Results(
            self._places,
            kv=kv,
            features=features,
            stats=self.stats,
            drafting=self._drafting,
            generates=not pools,
        )
        self._num_arrivals = 0
        self._num_steps = 0
        self._failed: list[EngineOutput] = []  # of requests that ended before they ran

    # ---- adding and ending requests

    @property
    def num_running(self) -> int:
        return len(self._places.running)

    @property
    def num_waiting(self) -> int:
        return self._places.num_waiting

    def has_unfinished_requests(self) -> bool:
        return bool(self._places.requests)

    def add_request(self, message: EngineRequest) -> None:
        """Add a validated request."""
        if message.request_id in self._places.requests:
            raise ValidationError(
                f"request_id={message.request_id!r} belongs to a request that has not finished; "
                "use another id or wait for that one to end",
                parameter="request_id",
                value=message.request_id,
            )
        hash_root = self._kv.hash_root(message.cache_salt, message.adapter)
        request = Request(message, hash_root=hash_root)
        assert 0 < request.num_prompt_tokens, f"{request}: empty prompt"
        assert 0 < message.max_tokens, f"{request}: max_tokens={message.max_tokens}"
        assert request.max_num_tokens <= self._max_model_len, (
            f"{request}: {request.max_num_tokens} tokens exceed {self._max_model_len}"
        )
        request.order = (*checked_key(self._policy, request), self._num_arrivals)
        self._num_arrivals += 1
        request.stats.queued_ts = time.monotonic()
        self._places.add(request, message.prefix_leader_id)
        self._settle()

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """End requests now. Unknown and finished ids are ignored."""
        found = map(self._places.requests.get, request_ids)
        return self._end_all((one for one in found if one is not None), FinishReason.ABORT)

    def end_all(self, reason: FinishReason, error: str | None = None) -> list[EngineOutput]:
        """End every unfinished request."""
        return self._end_all(list(self._places.requests.values()), reason, error)

    def restart(self) -> None:
        """Let all running requests start over, and forget every prefix, since the device's KV cache
        is lost. No step may be in flight."""
        dispatched, running = self._results.dispatched, self._places.running
        assert not dispatched, f"{len(dispatched)} steps are on their way"
        while running:
            self._places.preempt(running.pop())
        for feature in self._features:
            feature.lose()
        self._kv.lose()
        if self._drafting is not None:
            self._drafting.forget()
        self._settle()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, on the host and on disks too. Return False and change nothing
        if a request holds blocks."""
        if not self._kv.reset():
            return False
        if self._drafting is not None:
            self._drafting.forget()
        return True

    # ---- planning a step

    def schedule(self) -> Schedule | None:
        """Plan the next step, or return None if no request can compute a token now."""
        tier = self._kv.tier
        if tier is not None:
            tier.take_arrivals()
        self._release(wait=False)
        draft = StepDraft(self._features, reads_ahead=self._reads_ahead)
        budget, preempted = self._schedule_running(draft, self._max_num_batched_tokens)
        # Blocks that a preemption freed go to running requests, not to new ones.
        if not preempted:
            budget = self._schedule_waiting(draft, budget)
        rows = draft.in_order()
        if not rows and preempted:
            return self.schedule()  # the requests of the next lane get the freed blocks
        if not rows:
            if not self._results.dispatched and self._release(wait=True):
                return self.schedule()
            if not self._results.dispatched and self._places.requests:
                # The caller asks again: new requests and orders come in between.
                assert tier is not None and (tier.await_arrivals() or tier.has_coming), (
                    f"{len(self._places.requests)} unfinished requests; none of them can ever run"
                )
            self._settle()
            return None
        if self._lanes is not None:
            draft.carried_from = self._lanes.carried_from(rows)
        if self._drafting is not None:
            draft.draft_reads = self._drafting.take_reads()
        if self._kv.snapshots is not None:
            draft.state_copies = self._kv.snapshots.take_copies(rows)
        if tier is not None:
            draft.moves = tier.take_moves()
        schedule = draft.build(self._num_steps, rows)
        self._num_steps += 1
        self._results.dispatched.append(Dispatched(schedule, [*rows]))
        self._advance(rows)
        if self._lanes is not None:
            self._lanes.dispatch(schedule.step, rows)
        self.stats.count_step(schedule.total_tokens)
        self.stats.num_images_encoded += len(schedule.encodings)
        self._settle()
        return schedule

    def _release(self, *, wait: bool) -> bool:
        """Queue the requests that features hold no longer. Return whether there are any."""
        ready = [one for feature in self._features for one in feature.ready(wait=wait)]
        for request in ready:
            if request.error is None or request.is_finished:
                self._places.release(request)
            else:
                self._failed.append(self._places.end(request, FinishReason.ERROR, request.error))
        return bool(ready)

    def take_failed(self) -> list[EngineOutput]:
        """Return the outputs of requests that have ended since the last call without running."""
        failed, self._failed = self._failed, []
        return failed

    def _schedule_running(self, draft: StepDraft, budget: int) -> tuple[int, bool]:
        """Serve running requests. Return the budget left, and whether one was preempted."""
        everyone = self._places.running
        num_running = len(everyone)
        running = everyone if self._lanes is None else self._lanes.take_turn(everyone)
        add_decode = draft.decodes.append
        drafting = self._drafting
        if drafting is not None:
            drafting.begin(running)
        num_drafts = index = 0
        while index < len(running) and budget:
            request = running[index]
            index += 1
            num_tokens, num_computed = request.num_tokens, request.num_computed_tokens
            if num_tokens == request.max_num_tokens:
                continue  # its last token is in flight
            n = num_tokens - num_computed
            if n > 1:
                request.num_drafts = 0
                n = self._limit(request, num_computed, budget)
                if n == 0:
                    continue
            elif drafting is not None:
                num_drafts = drafting.draft(request, budget - 1 - (len(running) - index))
                n += num_drafts
            if num_computed + n > request.room:
                if not self._make_room(request, num_computed + n, running):
                    break
                draft.add_blocks(request)
            request.num_computed_tokens = num_computed + n
            budget -= n
            if n == 1:
                add_decode(request)
            else:
                draft.add_row(request, n, num_drafts)
                num_drafts = 0
            if num_computed < request.num_prompt_tokens:
                self.stats.num_prompt_tokens += request.count_prompt_tokens(n)
        return budget, len(everyone) < num_running

    def _make_room(self, request: Request, num_tokens: int, served: list[Request]) -> bool:
        """Give a running request blocks for `num_tokens` tokens. While blocks are short, preempt
        the last request in policy order.

        Running requests are served in order, so no victim is already in this step. Return False if
        the request itself was the last and was preempted.
        """
        while not self._kv.extend(request, num_tokens):
            victim = self._places.running.pop()
            if served and served[-1] is victim:  # with lanes, `served` is another list
                served.pop()
            self._places.preempt(victim)
            if victim is request:
                return False
        return True

    def _schedule_waiting(self, draft: StepDraft, budget: int) -> int:
        """Admit waiting requests in policy order while there are budget, slots and blocks.

        The first request that does not fit ends the round: no other overtakes it, so it cannot
        starve.
        """
        places = self._places
        while budget and places.free_slots:
            request = places.waiting.peek()
            if request is None:
                break
            if self._gate is not None and not self._gate.admits(request):
                places.hold_first()
                continue
            prefix = self._kv.find_now(request)
            if prefix is None:
                break  # most likely its blocks are on the host when the next step is planned
            num_cached = prefix * self._kv.block_size
            n = self._limit(request, num_cached, budget)
            # Keep one block in reserve for each running request. Otherwise a request that grows
            # would soon preempt the new one.
            if n == 0 or not self._kv.admit(request, prefix, reserve=len(places.running)):
                break
            places.admit_first(num_cached)
            request.num_computed_tokens = num_cached + n
            budget -= n
            adapter = NO_ADAPTER if self._gate is None else self._gate.admitted(request)
            draft.admit(request, num_cached, adapter)
            draft.add_row(request, n)
            self.stats.num_prompt_tokens += request.count_prompt_tokens(n)
        return budget

    def _limit(self, request: Request, start: int, budget: int) -> int:
        """How many of a request's tokens from `start` on to compute now."""
        n = request.num_tokens - start
        for limit in self._limits:
            n = limit(request, n, budget)
        return n if self._snapshots is None else self._snapshots.cut(request, start, n)

    def _advance(self, rows: list[Request]) -> None:
        """Count the tokens that the step samples, and let other requests share its full blocks."""
        for request in rows:
            num_computed = request.num_computed_tokens
            if num_computed == request.num_tokens:
                request.num_tokens += 1
            if num_computed >= request.next_block_at:
                self._kv.advance(request)
            if request.followers and num_computed >= request.num_prompt_tokens:
                self._places.release_followers(request)

    # ---- taking results in

    def update(self, schedule: Schedule, result: StepResult) -> list[EngineOutput]:
        """Take in the result of the oldest dispatched step; return the new outputs."""
        outputs = self._results.update(schedule, result)
        self._settle()
        return outputs

    def fail(self, schedule: Schedule, message: str) -> list[EngineOutput]:
        """End the requests of the oldest dispatched step, which did not run, and of all later
        steps."""
        outputs = self._results.fail(schedule, message)
        self._settle()
        return outputs

    def expert_tokens(self, num_experts: Mapping[int, int]) -> dict[int, list[int]]:
        """The tokens of each expert since the start, for layers with so many of them."""
        totals = self._results.expert_tokens
        if totals is None:
            return {layer: [0] * count for layer, count in num_experts.items()}
        return {layer: totals[layer, :count].tolist() for layer, count in num_experts.items()}

    # ---- bookkeeping

    def _end_all(
        self, requests: Iterable[Request], reason: FinishReason, error: str | None = None
    ) -> list[EngineOutput]:
        outputs = self._places.end_all(requests, reason, error)
        self._settle()
        return outputs

    def _settle(self) -> None:
        """Update the gauges, and check the invariants if `check_invariants` is set."""
        self._places.count()
        if self._check_invariants:
            self.check()

    def check(self) -> None:
        """Assert the invariants. The cost grows with all requests and blocks."""
        invariants.check(
            requests=self._places.requests,
            running=self._places.running,
            waiting=self._places.waiting,
            dispatched=self._results.dispatched,
            free_slots=self._places.free_slots,
            kv=self._kv,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens,
        )
