"""Pooling on the host: which rows of a step bring vectors, and to which output they belong.

A pooling request is one of a single token, which the device does not sample: where it would, the
prompt is complete, and the row's vector is the answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxllm.messages import EngineOutput
from jaxllm.pooling.slice import ROWS, TOKENS
from jaxllm.scheduler.features import Drafted
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.schedule import Schedule, StepResult


@dataclass(frozen=True, slots=True)
class PooledParts:
    """The vectors in a step's result, by row."""

    rows: dict[int, np.ndarray]  # f32 [n, K]
    corrupted: Iterable[int] = ()  # the step's tail has told them
    failed: dict[int, str] = field(default_factory=dict)
    complete: tuple[int, ...] = ()

    def add_to(self, output: EngineOutput, row: int) -> None:
        output.new_vectors = self.rows[row].astype("<f4").tobytes()
        output.new_token_ids = []  # nothing was generated


class _Pooling:
    """What both kinds have in common."""

    def __init__(self) -> None:
        self._using: set[str] = set()

    def ready(self, *, wait: bool) -> Sequence[Request]:
        return ()  # it holds no request

    def drop(self, request: Request) -> None:
        self._using.discard(request.request_id)

    def limit(self, request: Request, n: int, budget: int) -> int:
        return n


class RowPooling(_Pooling):
    """A vector for a whole prompt."""

    name = ROWS

    def __init__(self, needs_whole_prompts: bool) -> None:
        super().__init__()
        self._needs_whole_prompts = needs_whole_prompts

    def add(self, request: Request) -> None:
        if not is_of_tokens(request):
            self._using.add(request.request_id)
            # What another request has computed has no hidden states.
            request.num_cache_bars += self._needs_whole_prompts

    def start_over(self, request: Request) -> None:
        pass  # a row that begins a prompt takes no sum of its slot

    def lose(self) -> None:
        pass  # it keeps nothing on the device

    def draft(self, rows: Sequence[Request], num_tokens: np.ndarray) -> Drafted:
        ended = [
            row
            for row, request in enumerate(rows)
            if request.num_computed_tokens == request.num_tokens
            and request.request_id in self._using
        ]
        its = {"rows": np.array(ended, np.int32)} if ended else {}
        # An engine that pools has no programs for decodes.
        return Drafted(its, needs_mixed=True, wants_logits=False)

    def read(
        self, schedule: Schedule, result: StepResult, rows: Sequence[Request | None]
    ) -> PooledParts:
        if not (its := schedule.slices[ROWS]):
            return PooledParts({})
        vectors = result.slices[ROWS]["vectors"]
        return PooledParts({row: vectors[row : row + 1] for row in its["rows"].tolist()})


class TokenPooling(_Pooling):
    """A vector for each token of a prompt."""

    name = TOKENS

    def __init__(self) -> None:
        super().__init__()
        self._num_read: dict[str, int] = {}  # tokens whose vectors are in outputs

    def add(self, request: Request) -> None:
        if is_of_tokens(request):
            self._using.add(request.request_id)
            self._num_read[request.request_id] = 0
            request.num_cache_bars += 1

    def drop(self, request: Request) -> None:
        super().drop(request)
        self._num_read.pop(request.request_id, None)

    def start_over(self, request: Request) -> None:
        pass  # what has been read stays, and the same vectors are not read again

    def lose(self) -> None:
        pass  # it keeps nothing on the device

    def draft(self, rows: Sequence[Request], num_tokens: np.ndarray) -> Drafted | None:
        if not self._using:
            return None
        firsts = np.cumsum(num_tokens) - num_tokens
        spans = [
            (row, int(firsts[row]), request.num_computed_tokens - int(size), int(size))
            for row, (request, size) in enumerate(zip(rows, num_tokens, strict=True))
            if request.request_id in self._using
        ]
        if not spans:
            return None
        its = {"spans": np.array(spans, np.int32)}
        return Drafted(its, needs_mixed=True, wants_logits=False)

    def read(
        self, schedule: Schedule, result: StepResult, rows: Sequence[Request | None]
    ) -> PooledParts:
        vectors = result.slices[TOKENS]["vectors"]
        parts: dict[int, np.ndarray] = {}
        for row, first, position, size in schedule.slices[TOKENS]["spans"].tolist():
            request = rows[row]
            if request is None or request.is_finished:
                continue
            # A preempted request computes its prompt again.
            num_read = self._num_read[request.request_id]
            skipped = min(max(num_read - position, 0), size)
            parts[row] = vectors[first + skipped : first + size]
            self._num_read[request.request_id] = max(num_read, position + size)
        corrupted = [row for row, its in parts.items() if not np.isfinite(its).all()]
        return PooledParts(parts, corrupted)


def is_of_tokens(request: Request) -> bool:
    """Whether a request wants a vector for each token."""
    return request.pooling_task in ("token_embed", "token_classify")
