"""Logprobs of prompt tokens, on the host: requests them for each chunk, and puts them in outputs.

They come from computing the prompt, so a request that wants them takes no prefix from the cache
until all of them are dispatched.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxllm.messages import EngineOutput, PositionLogprobs
from jaxllm.prompt_logprobs.slice import NAME, NO_TARGET
from jaxllm.sampling_params import MAX_STEP_LOGPROBS
from jaxllm.scheduler.features import Drafted
from jaxllm.scheduler.logprobs import row_logprobs
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.schedule import LogprobArrays, Schedule, StepResult


@dataclass(frozen=True, slots=True)
class PromptParts:
    """The logprobs in a step's result, by row."""

    rows: dict[int, list[PositionLogprobs]]
    corrupted: set[int]
    next_unread: dict[str, int]  # of the feature
    failed: dict[int, str] = field(default_factory=dict)
    complete: tuple[int, ...] = ()

    def add_to(self, output: EngineOutput, row: int) -> None:
        output.new_prompt_logprobs = self.rows[row]
        self.next_unread[output.request_id] += len(self.rows[row])


class PromptLogprobs:
    """The feature's host half."""

    name = NAME

    def __init__(self) -> None:
        # The next prompt position to compute, for each request that still wants some.
        self._next: dict[str, int] = {}
        # The first prompt position that no output has, for each request that wants some.
        self._next_unread: dict[str, int] = {}

    def add(self, request: Request) -> None:
        """Note a request that wants prompt logprobs. The first prompt token has none."""
        wants = request.sampling_params.prompt_logprobs is not None
        if wants and request.num_prompt_tokens > 1:
            self._next[request.request_id] = self._next_unread[request.request_id] = 1
            request.num_cache_bars += 1

    def ready(self, *, wait: bool) -> Sequence[Request]:
        return ()  # it holds no request

    def drop(self, request: Request) -> None:
        self._next.pop(request.request_id, None)
        self._next_unread.pop(request.request_id, None)

    def start_over(self, request: Request) -> None:
        unread = self._next_unread.get(request.request_id, request.num_prompt_tokens)
        if unread < request.num_prompt_tokens:
            request.num_cache_bars += request.request_id not in self._next
            self._next[request.request_id] = unread

    def lose(self) -> None:
        pass  # it keeps nothing on the device

    def limit(self, request: Request, n: int, budget: int) -> int:
        """Give one position per step to a request that wants more than MAX_STEP_LOGPROBS. These
        come from logits, and a step brings the logits of a row's last position only. So such a
        prompt is as slow as decoding."""
        first = self._next.get(request.request_id)
        if first is None or _count(request) <= MAX_STEP_LOGPROBS:
            return n
        return min(n, first - request.num_computed_tokens)

    def draft(self, rows: Sequence[Request], num_tokens: np.ndarray) -> Drafted | None:
        if not self._next:
            return None
        wanted = [row for row, request in enumerate(rows) if request.request_id in self._next]
        if not wanted:
            return None
        row_ends = np.cumsum(num_tokens)
        targets = np.full(row_ends[-1], NO_TARGET, np.int32)
        spans = []
        for row in wanted:
            request = rows[row]
            # The token at position p gives the logprob of the prompt token at p + 1. Positions that
            # were dispatched before a preemption are not computed again.
            first = self._next[request.request_id]
            end = min(request.num_computed_tokens + 1, request.num_prompt_tokens)
            if first < end:
                offset = int(row_ends[row]) - request.num_computed_tokens - 1
                spans.append((row, first + offset, end + offset))
                targets[first + offset : end + offset] = request.prompt_token_ids[first:end]
                self._move_on(request, end)
        if not spans:
            return None
        counts = [_count(rows[row]) for row, _, _ in spans]
        wants_more = any(1 < count <= MAX_STEP_LOGPROBS for count in counts)
        return Drafted(
            {
                "targets": targets,
                "wants_more": np.array(wants_more, np.int32),
                "spans": np.array(spans, np.int32),
            },
            needs_mixed=True,
            wants_logits=max(counts) > MAX_STEP_LOGPROBS,
        )

    def read(
        self, schedule: Schedule, result: StepResult, rows: Sequence[Request | None]
    ) -> PromptParts:
        arrays = LogprobArrays(**result.slices[NAME])
        parts: dict[int, list[PositionLogprobs]] = {}
        corrupted: set[int] = set()
        for row, start, end in schedule.slices[NAME]["spans"].tolist():
            request = rows[row]
            if request is None or request.is_finished:
                continue
            if not np.isfinite(arrays.logprobs[start:end, 0]).all():
                corrupted.add(row)
                continue
            # A span that needs logits has one position, the last of its row (see `limit`).
            logits = None if result.logits is None else result.logits[row]
            count = _count(request)
            parts[row] = [row_logprobs(arrays, i, count, logits) for i in range(start, end)]
        return PromptParts(parts, corrupted, self._next_unread)

    def _move_on(self, request: Request, position: int) -> None:
        """Note that the logprobs of all earlier positions are dispatched."""
        if position < request.num_prompt_tokens:
            self._next[request.request_id] = position
        else:
            del self._next[request.request_id]
            request.num_cache_bars -= 1


def _count(request: Request) -> int:
    count = request.sampling_params.prompt_logprobs
    assert count is not None, request
    return count
