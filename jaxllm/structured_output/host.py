"""Grammars of requests in the engine: which rows sample under one, their masks, their ends.

A mask needs all tokens before the one that it is for, and the engine plans and dispatches a step
before it has them. So these rows sample *late*: their step runs as far as the logits, and samples
when the masks are there (`EngineCore.step`). This is a `Feature` of the scheduler, which drafts the
late rows; the engine core asks it for their masks.

A request's matcher has consumed exactly its known output tokens. A preempted request keeps it.

Where the grammar forces several tokens, their masks need no matcher, and only the first of them is
sampled: the others are added to the request (`Request.force`), whose next row computes them all.
"""

import concurrent.futures
import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher

from jaxllm.messages import EngineOutput
from jaxllm.scheduler.features import Drafted
from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.scheduler.schedule import NO_TOKEN, LateMasks, Schedule, StepResult
from jaxllm.structured_output.form import Form, may_skip, message
from jaxllm.structured_output.matchers import CompiledGrammars, Masks
from jaxllm.structured_output.vocabulary import WORD_BITS, Vocabulary, num_words

_ANY_TOKEN = -1  # a word of a mask with all bits


@dataclass(frozen=True, slots=True)
class Ends:
    """The requests that a step's tokens end, by row."""

    failed: dict[int, str] = field(default_factory=dict)
    complete: list[int] = field(default_factory=list)
    corrupted: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()

    def add_to(self, output: EngineOutput, row: int) -> None:
        raise AssertionError("it has no rows")


class StructuredOutput:
    """The grammars of an engine's requests."""

    name = "structured_output"

    def __init__(self, load: Callable[[], Vocabulary], vocab_size: int):
        """Use the vocabulary that `load` returns or raises an error for. The first request with a
        grammar calls it."""
        self._num_words = num_words(vocab_size)
        self._grammars = CompiledGrammars(load)
        self._masks = Masks()
        self._forms: dict[str, Form] = {}  # of the unfinished requests with a grammar
        self._held: dict[str, tuple[Request, Future[LLMatcher]]] = {}
        # Of the newest step; with how many drafts.
        self._late: list[tuple[Request, int]] = []

    def add(self, request: Request) -> None:
        """Note a request; hold it while its grammar is compiled."""
        if request.grammar is None:
            return
        future = self._grammars.get(request.grammar)
        self._forms[request.request_id] = Form(may_skip(request.sampling_params))
        if future.done():
            self._begin(request, future)
        else:
            self._held[request.request_id] = request, future
            request.num_holds += 1

    def ready(self, *, wait: bool) -> Iterable[Request]:
        if not self._held:
            return ()
        if wait:
            futures = [future for _, future in self._held.values()]
            concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED)
        ready = [(request, future) for request, future in self._held.values() if future.done()]
        for request, future in ready:
            del self._held[request.request_id]
            self._begin(request, future)
        return [request for request, _ in ready]

    def drop(self, request: Request) -> None:
        self._forms.pop(request.request_id, None)
        self._held.pop(request.request_id, None)

    def start_over(self, request: Request) -> None:
        """Forget a token that was read with a result that is dropped."""
        form = self._forms.get(request.request_id)
        if form is not None:
            form.go_back(form.num_consumed - len(request.output_token_ids))

    def lose(self) -> None:
        pass  # it keeps nothing on the device

    def limit(self, request: Request, n: int, budget: int) -> int:
        return n

    def draft(self, rows: Sequence[Request], num_tokens: np.ndarray) -> Drafted | None:
        if not self._forms:
            return None
        late = [
            row
            for row, request in enumerate(rows)
            if request.grammar is not None and request.num_computed_tokens == request.num_tokens
        ]
        if not late:
            return None
        self._late = [(rows[row], rows[row].num_drafts) for row in late]
        late_rows = np.array(late, np.int32)
        return Drafted({}, needs_mixed=False, wants_logits=False, late_rows=late_rows)

    @property
    def knows_tokens(self) -> bool:
        """Whether all tokens are known on which the masks of the newest step depend."""
        return max(self._num_in_flight()) <= 1

    def masks(self, drafts: np.ndarray | None = None) -> LateMasks:
        """Return the masks of the newest step's late rows, once `knows_tokens`. `drafts` int32
        [n, k] are those of its late rows with drafts, if they were not proposed by the step before.

        A row whose request has ended or started over gets a mask of all tokens, and so does one
        whose matcher has failed. The tokens of both are dropped. Call this once for a step: the
        tokens that are forced after a row's are added to its request."""
        in_flight = self._num_in_flight()
        made = iter(()) if drafts is None else iter(drafts.tolist())
        masks = np.full((len(in_flight), self._num_words), _ANY_TOKEN, np.int32)
        going_on: list[tuple[LLMatcher, int]] = []
        drafting: list[_Drafting] = []
        for row, ((request, num_drafts), count) in enumerate(
            zip(self._late, in_flight, strict=True)
        ):
            proposal = next(made, request.proposal) if num_drafts else []
            form = self._forms[request.request_id] if count == 1 else _NO_FORM
            if form.matcher is None:
                continue
            if forced := form.forced():
                _allow_only(forced[0], masks[row])
                if form.skips and not num_drafts:
                    request.force(forced)
            else:
                going_on.append((form.matcher, row))
            if num_drafts:
                drafting.append(_Drafting(row, form, forced, proposal[:num_drafts]))
        self._masks.fill(going_on, masks)
        for matcher, row in going_on:
            if matcher.is_error():
                self._forms[self._late[row][0].request_id].fail()
                masks[row] = _ANY_TOKEN
        return self._with_drafts(masks, drafting) if drafting else LateMasks(masks)

    def _num_in_flight(self) -> list[int]:
        """How many tokens of each late row's request are in flight: the one that the row samples,
        and others if a step before it is. Its drafts may be accepted."""
        return [0 if r.is_finished else r.num_in_flight - drafts for r, drafts in self._late]

    def _with_drafts(self, first: np.ndarray, drafting: "list[_Drafting]") -> LateMasks:
        """Add the masks behind the drafts of rows, up to the first that the grammar does not take.
        `first` are those before the drafts."""
        most = max(len(its.proposal) for its in drafting)
        drafts = np.full((len(first), most), NO_TOKEN, np.int32)
        more: list[np.ndarray] = []
        for row, form, forced, proposal in drafting:
            masks = self._behind(form, proposal, first[row])
            taken = proposal[: len(masks)]
            drafts[row, : len(masks)] = taken
            more += masks
            if form.skips:
                _settle(*self._late[row], forced, taken)
        if not more:
            return LateMasks(first)
        return LateMasks(first, drafts, np.stack(more))

    def _behind(self, form: Form, proposal: list[int], mask: np.ndarray) -> list[np.ndarray]:
        """The masks behind the tokens of a proposal, as far as the text goes on there; `mask` is
        the one before them."""
        masks: list[np.ndarray] = []
        ahead = form.copy()
        for token in proposal:
            if ahead.matcher is None or not _allows(mask, token):
                break
            ahead.consume([token])
            if ahead.matcher is None or ahead.matcher.is_stopped():
                break
            mask = np.empty(self._num_words, np.int32)
            if forced := ahead.forced():
                _allow_only(forced[0], mask)
            else:
                self._masks.fill([(ahead.matcher, 0)], mask[None])
                if ahead.matcher.is_error():
                    break
            masks.append(mask)
        return masks

    def read(self, schedule: Schedule, result: StepResult, rows: Sequence[Request | None]) -> Ends:
        """Let the matchers consume the tokens that have arrived."""
        ends = Ends()
        assert schedule.late_rows is not None, f"step {schedule.step} has no late rows"
        late = schedule.late_rows
        drafted = result.drafted if schedule.num_drafts is not None else None
        for row, token in zip(late.tolist(), result.token_ids[late].tolist(), strict=True):
            request = rows[row]
            tokens = [token]
            if drafted is not None:
                tokens += drafted.token_ids[row, : drafted.num_accepted[row]].tolist()
            if request is None or request.is_finished or NO_TOKEN in tokens:
                continue
            form = self._forms[request.request_id]
            form.consume(tokens + request.forced[len(tokens) :])
            if form.matcher is None:
                ends.failed[row] = form.error
            elif form.matcher.is_stopped():
                ends.complete.append(row)
        return ends

    def close(self) -> None:
        self._grammars.close()

    def _begin(self, request: Request, future: Future[LLMatcher]) -> None:
        form = self._forms[request.request_id]
        error = future.exception()
        if error is None:
            form.matcher = future.result().deep_copy()
        else:
            form.error = message(str(error))


class _Drafting(NamedTuple):
    """A late row with drafts."""

    row: int  # among the late ones
    form: Form
    forced: list[int]  # the tokens that must come behind its newest
    proposal: list[int]


_NO_FORM = Form()


def _settle(request: Request, num_drafts: int, forced: list[int], taken: list[int]) -> None:
    """Add the tokens to a request that are forced behind those of its row with drafts, of which the
    grammar takes some. What is forced goes beyond the drafts, so it decides which are right."""
    pairs = zip(forced, taken, strict=False)
    num_right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    if num_right + 1 < len(forced) and request.status is RequestStatus.RUNNING:
        request.settle(num_drafts, num_right)
        request.force(forced)


def _allows(mask: np.ndarray, token: int) -> bool:
    """Whether a mask has the bit of a token, which may be any number."""
    if not 0 <= token < WORD_BITS * len(mask):
        return False
    return bool(mask.view(np.uint32)[token // WORD_BITS] >> token % WORD_BITS & 1)


def _allow_only(token: int, mask: np.ndarray) -> None:
    """Set a mask to that of one token."""
    mask[:] = 0
    mask.view(np.uint32)[token // WORD_BITS] = 1 << token % WORD_BITS
