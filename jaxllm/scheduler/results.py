"""Takes in the results of steps in their order of dispatch: tokens, failures, corrupted rows."""

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.logging import init_logger
from jaxllm.messages import EngineOutput, FinishReason
from jaxllm.metrics.stats import EngineStats
from jaxllm.scheduler.corruption import CORRUPTED, corrupted_rows
from jaxllm.scheduler.features import Brought, Feature
from jaxllm.scheduler.kv.manager import KVCacheManager
from jaxllm.scheduler.logprobs import row_logprobs
from jaxllm.scheduler.places import Places
from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.scheduler.schedule import NO_TOKEN, Schedule, StepResult
from jaxllm.scheduler.speculation import Drafting

logger = init_logger(__name__)


class Dispatched(NamedTuple):
    """A step in flight. It keeps the requests themselves, since a slot or an id may be reused
    before the step comes back."""

    schedule: Schedule
    rows: list[Request | None]  # None: the result of the row is to be dropped


class Results:
    """The steps in flight, and what happens to their requests when they come back."""

    def __init__(
        self,
        places: Places,
        *,
        kv: KVCacheManager,
        features: Sequence[Feature],
        stats: EngineStats,
        drafting: Drafting | None = None,
        generates: bool = True,
    ) -> None:
        """`generates` is whether the tokens of results are counted as generated ones."""
        self.dispatched: deque[Dispatched] = deque()  # the oldest first
        self.expert_tokens: np.ndarray | None = None  # [L, E], since the start
        self._places = places
        self._kv = kv
        self._features = features
        self._stats = stats
        self._drafting = drafting
        self._generates = generates

    def update(self, schedule: Schedule, result: StepResult) -> list[EngineOutput]:
        """Take in the result of the oldest dispatched step; return the new outputs."""
        step = self._take_oldest(schedule)
        now = time.monotonic()
        if result.expert_tokens is not None:
            before = 0 if self.expert_tokens is None else self.expert_tokens
            self.expert_tokens = before + result.expert_tokens.astype(np.int64)
        token_ids = result.token_ids[: len(step.rows)].tolist()
        has_drafts = schedule.num_drafts is not None
        corrupted = set[int]()
        if has_drafts or NO_TOKEN in token_ids:
            corrupted = corrupted_rows(schedule, result)
        drafting = self._drafting
        if drafting is not None:
            drafting.read(schedule, result)
        parts: dict[int, list[Brought]] = {}  # of features, by row
        failed: dict[int, str] = {}
        complete: set[int] = set()
        for brought in self._read_slices(step, result) if schedule.slices else ():
            corrupted.update(brought.corrupted)
            failed.update(brought.failed)
            complete.update(brought.complete)
            for row in brought.rows:
                parts.setdefault(row, []).append(brought)
        outputs: list[EngineOutput] = []
        for row in sorted(corrupted):
            outputs += self._end_corrupted(step, row)
        for row, message in failed.items():
            request = step.rows[row]
            if request is not None and not request.is_finished:
                outputs.append(self._places.end(request, FinishReason.ERROR, message))
        num_new_tokens = 0
        any_finished = bool(corrupted or failed)
        wants_logprobs = schedule.wants_logprobs
        finished, parked = RequestStatus.FINISHED, RequestStatus.PARKED
        for row, (request, samples, token) in enumerate(
            zip(step.rows, schedule.samples.tolist(), token_ids, strict=True)
        ):
            if request is None or request.status is finished:
                continue  # it ended or started over after this row was dispatched
            if not samples:
                if row in parts:
                    output = EngineOutput(request_id=request.request_id)
                    outputs.append(output)
                    for brought in parts[row]:
                        brought.add_to(output, row)
                continue
            tokens = [token] if drafting is None else drafting.take(request, row, token)
            if request.forced:
                tokens += request.take_forced(len(tokens))
            finish = request.take_tokens(tokens)
            num_new_tokens += len(tokens)
            stats = request.stats
            stats.last_token_ts = now
            output = EngineOutput(
                request_id=request.request_id,
                new_token_ids=tokens,
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
                if drafting is not None and len(tokens) > 1:
                    output.new_logprobs += drafting.more_logprobs(
                        row, len(tokens) - 1, request.sampling_params.logprobs
                    )
            if parts and row in parts:
                for brought in parts[row]:
                    brought.add_to(output, row)
            if row in complete and (finish is None or finish[0] is FinishReason.LENGTH):
                finish = FinishReason.STOP, None
            if finish is not None:
                output.finish_reason, output.stop_reason = finish
                output.stats = request.report_stats()
                self._places.finish(request)
                any_finished = True
            elif request.status is parked and not request.num_in_flight:
                self._places.wait(request)
        if self._generates:
            self._stats.num_generation_tokens += num_new_tokens
        if any_finished:
            self._places.drop_finished()
        return outputs

    def fail(self, schedule: Schedule, message: str) -> list[EngineOutput]:
        """End the requests of the oldest dispatched step, which did not run.

        Later steps read the keys, values and tokens that it should have written, so their requests
        end too. The prefix cache forgets every block that any of these requests may have filled.
        """
        step = self._take_oldest(schedule)
        outputs = []
        touched = [request for later in (step, *self.dispatched) for request in later.rows]
        for request in filter(None, touched):
            if not request.is_finished:
                outputs.append(self._places.end(request, FinishReason.ERROR, error=message))
            self._kv.forget(request)
        self._places.drop_finished()
        return outputs

    def _read_slices(self, step: Dispatched, result: StepResult) -> list[Brought]:
        slices = step.schedule.slices
        return [
            feature.read(step.schedule, result, step.rows)
            for feature in self._features
            if feature.name in slices
        ]

    def _take_oldest(self, schedule: Schedule) -> Dispatched:
        step = self.dispatched.popleft()
        assert step.schedule is schedule, (
            f"step {schedule.step} came back, step {step.schedule.step} is the oldest"
        )
        return step

    def _end_corrupted(self, step: Dispatched, row: int) -> list[EngineOutput]:
        """Finish the request of a row whose logits are not finite, or let it start over if blocks
        that it has taken over may be the cause. Make its blocks unfindable for other requests.
        `drop_finished` must follow."""
        request = step.rows[row]
        if request is None or request.is_finished:
            return []  # it ended or started over after this row was dispatched
        step.rows[row] = None
        self._kv.forget(request)
        if request.has_taken_over_blocks and request.hash_root is not None:
            self._start_over(request)
            return []
        if not self._stats.num_requests_corrupted:
            logger.error("%s ended: %s. More are only counted.", request.request_id, CORRUPTED)
        self._stats.num_requests_corrupted += 1
        request.stats.is_corrupted = True
        output = self._places.end(request, FinishReason.ERROR, CORRUPTED)
        self._kv.forget(request)  # its end has registered blocks
        return [output]

    def _start_over(self, request: Request) -> None:
        """Compute a request again, in blocks of its own; `drop_finished` must follow. Drop the
        results of its rows in steps in flight."""
        for step in self.dispatched:
            step.rows[:] = [None if row is request else row for row in step.rows]
        for feature in self._features:
            feature.start_over(request)
        request.hash_root = None
        request.num_tokens = request.num_known_tokens
        request.num_uncertain = 0
        request.forced, request.settled = [], None
        if request.status is RequestStatus.RUNNING:
            self._places.preempt(request)
        else:  # it was preempted before, and parked until this token arrived
            self._places.wait(request)
