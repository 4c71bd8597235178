"""Speculation, on the host: which rows have drafts, and which tokens they brought.

The host plans a step while it does not know how many drafts of the step before are accepted. So it
counts them all: `num_tokens` and `num_computed_tokens` of a request are the most that there can be,
and `num_uncertain` says how many of these tokens may turn out to be refused. Blocks are taken for
the most. What must not be undone goes by the least: which blocks are registered in the prefix
cache, and which are given back behind a window.

A row with drafts costs more than a decode, even if none is accepted. So a request gets drafts only
if the drafter had a proposal in its latest step that has come back, and pauses when its drafts have
brought little; a draft model and a head always have one. The other rows of the step wait for it,
too. So nobody gets drafts if few of the requests have proposals.
"""

from collections.abc import Sequence

from jaxllm.messages import PositionLogprobs
from jaxllm.metrics.stats import EngineStats
from jaxllm.sampling_params import MAX_STEP_LOGPROBS
from jaxllm.scheduler.draft_reads import Reader
from jaxllm.scheduler.kv.manager import KVCacheManager
from jaxllm.scheduler.logprobs import row_logprobs
from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.scheduler.schedule import DraftedResult, DraftReads, Schedule, StepResult
from jaxllm.speculative_config import Speculation

# A step with drafts is worth its price if it brings this many tokens more for each of its rows, on
# average.
_MIN_GAIN = 0.5
# The weight of a request's latest row in its average.
_WEIGHT = 0.25
# For how many steps a request pauses, the first time and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 128


class Drafting:
    """Gives rows their drafts, and takes in what became of them."""

    def __init__(
        self,
        speculation: Speculation,
        kv: KVCacheManager,
        stats: EngineStats,
        *,
        max_num_batched_tokens: int,
    ) -> None:
        self._by_requests = speculation.drafts_by_requests
        self._waits_for_proposals = speculation.proposes
        self._verifies_late = speculation.verifies_late
        self._kv = kv
        self._reader: Reader | None = None
        if speculation.draft_model is not None:
            longest = speculation.draft_model.max_model_len
            assert longest is not None, "the plan says how long texts with drafts may be"
            self._reader = Reader(
                kv,
                max_tokens=max_num_batched_tokens,
                max_rows=speculation.max_rows,
                max_model_len=longest,
            )
        self._stats = stats
        stats.num_accepted_by_place = [0] * speculation.num_drafts
        self._most = 0  # drafts of a row in the step that is planned
        # Of the step that is taken in.
        self._num_drafts: list[int] = []
        self._num_accepted: list[int] = []
        self._num_proposed: list[int] = []
        self._drafted: DraftedResult | None = None

    def begin(self, running: Sequence[Request]) -> None:
        """Begin to plan a step."""
        num_running = len(running)
        in_table = 0 < num_running <= len(self._by_requests)
        self._most = self._by_requests[num_running - 1] if in_table else 0
        if self._reader is not None:
            self._reader.begin()
        if not self._most:
            return
        gain = 0.0
        for request in running:
            if request.draft_pause:
                request.draft_pause -= 1
            elif request.num_proposed or (
                not self._waits_for_proposals and self._may_draft(request)
            ):
                gain += request.draft_gain
        if gain < _MIN_GAIN * num_running:
            self._most = 0

    def draft(self, request: Request, spare: int) -> int:
        """Count drafts behind the newest token of a request, and return how many there are. `spare`
        is what the step has left of its budget beside a token for each running request."""
        count = self._count(request, spare)
        request.num_drafts = count
        if not count:
            return 0
        request.num_tokens += count
        request.num_uncertain += count
        return count

    def take_reads(self) -> DraftReads | None:
        """What a draft model reads before the planned step; None: nothing."""
        return None if self._reader is None else self._reader.take()

    def forget(self) -> None:
        """Note that the caches are lost."""
        if self._reader is not None:
            self._reader.forget()

    def _count(self, request: Request, spare: int) -> int:
        """How many drafts a request gets behind its newest token."""
        if not self._most or request.draft_pause or not self._may_draft(request):
            return 0
        if self._waits_for_proposals and not request.num_proposed:
            return 0
        count = min(self._most, spare, request.max_num_tokens - request.num_tokens - 1)
        if self._reader is not None:
            count = min(count, self._reader.most_drafts(request))
        end = request.num_computed_tokens + 1 + count
        if end > request.room and not self._kv.fits(request, end):
            count = request.room - request.num_computed_tokens - 1
        if self._kv.snapshots is not None:
            count = min(count, self._kv.snapshots.most_drafts(request))
        if count <= 0 or not (self._reader is None or self._reader.is_ready(request)):
            return 0
        return count

    def read(self, schedule: Schedule, result: StepResult) -> None:
        """Begin to take a step in."""
        drafted = result.drafted
        assert drafted is not None, f"step {schedule.step} brought no figures of drafts"
        self._drafted = drafted
        self._num_proposed = drafted.num_proposed.tolist()
        drafts = schedule.num_drafts
        self._num_drafts = [] if drafts is None else drafts.tolist()
        self._num_accepted = [] if drafts is None else drafted.num_accepted.tolist()

    def take(self, request: Request, row: int, first: int) -> list[int]:
        """Return the tokens that a row has sampled, of which `first` is the first, and count its
        request's tokens anew."""
        # A request that was preempted since then has computed nothing.
        runs = request.status is RequestStatus.RUNNING
        request.num_proposed = self._num_proposed[row] if runs else 0
        drafted = self._drafted
        assert drafted is not None
        if drafted.proposals is not None and request.grammar is not None:
            request.proposal = drafted.proposals[row, : request.num_proposed].tolist()
        if not self._num_drafts or not (num_drafts := self._num_drafts[row]):
            return [first]
        num_accepted = self._num_accepted[row]
        if request.settled is None:
            request.count_drafts(num_drafts, num_accepted)
        request.settled = None
        if runs and self._reader is not None:
            # At least those up to the row's newest one, which the request has known until now.
            self._reader.note(request, request.num_known_tokens)
        self._weigh(request, num_accepted)
        stats = self._stats
        stats.num_drafts += 1
        stats.num_draft_tokens += num_drafts
        stats.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            stats.num_accepted_by_place[place] += 1
        return [first, *drafted.token_ids[row, :num_accepted].tolist()]

    def more_logprobs(self, row: int, num_tokens: int, count: int) -> list[PositionLogprobs]:
        """The logprobs of the first tokens of a row after its first one."""
        drafted = self._drafted
        assert drafted is not None and drafted.logprobs is not None
        begin = row * drafted.token_ids.shape[1]
        return [row_logprobs(drafted.logprobs, begin + i, count) for i in range(num_tokens)]

    def _weigh(self, request: Request, num_accepted: int) -> None:
        """Note how many drafts of a row were accepted. Let the request pause if it is too few, each
        time for longer."""
        request.draft_gain += _WEIGHT * (num_accepted - request.draft_gain)
        if request.draft_gain >= _MIN_GAIN:
            request.next_draft_pause = 0
        elif not request.draft_pause:
            pause = request.next_draft_pause or _FIRST_PAUSE
            request.draft_pause = pause
            request.next_draft_pause = min(2 * pause, _LONGEST_PAUSE)
            # After the pause a single row that brings much is enough.
            request.draft_gain = _MIN_GAIN

    def _may_draft(self, request: Request) -> bool:
        """Whether a row of the request may have drafts."""
        if request.grammar is not None and not self._verifies_late:
            return False  # the host cannot read what weights have drafted on several hosts
        # More logprobs come from logits, and a step leaves those of one token for each row.
        return (request.sampling_params.logprobs or 0) <= MAX_STEP_LOGPROBS
