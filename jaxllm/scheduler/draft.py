"""A step while the scheduler plans it: collects rows and block table changes for a Schedule.

`build` makes each array once, from a whole list.
"""

from array import array
from collections.abc import Sequence
from operator import itemgetter

import numpy as np

from jaxllm.sampling_params import MAX_STEP_LOGPROBS
from jaxllm.scheduler.features import Feature
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.schedule import (
    CARRIED_TOKEN,
    DRAFT_TOKEN,
    GO_ON,
    NO_ADAPTER,
    NO_TOKEN,
    Admission,
    BlockMoves,
    DraftReads,
    Schedule,
    StateCopies,
)

_num_tokens = itemgetter(1)


class StepDraft:
    """The caller advances `Request.num_computed_tokens` before it adds a row, and counts the
    sampled tokens after `build`. In `build` the features take the step as dispatched."""

    def __init__(self, features: Sequence[Feature] = (), *, reads_ahead: bool = False) -> None:
        """`reads_ahead` is whether the step needs the token behind a part of a prompt."""
        self._features = features
        self._reads_ahead = reads_ahead
        self.decodes: list[Request] = []  # they compute one token
        # They compute more. The last number is how many of these tokens are drafts.
        self._chunks: list[tuple[Request, int, int]] = []
        self._has_drafts = False
        self.carried_from: int | None = None  # as in Schedule
        self.draft_reads: DraftReads | None = None  # as in Schedule
        self.moves: BlockMoves | None = None  # as in Schedule
        self.state_copies: StateCopies | None = None  # as in Schedule
        self._admissions: list[Admission] = []
        self._starts: dict[int, int] = {}  # of the admitted requests, by slot
        # Block updates, as in Schedule: single ones one after another, longer parts as arrays.
        self._single_updates: list[int] = []
        self._long_updates: list[np.ndarray] = []

    def add_row(self, request: Request, num_tokens: int, num_drafts: int = 0) -> None:
        if num_tokens == 1:
            self.decodes.append(request)
        else:
            self._chunks.append((request, num_tokens, num_drafts))
            self._has_drafts |= num_drafts > 0

    def add_blocks(self, request: Request) -> None:
        """Note the part of the request's block tables that the device does not have yet."""
        for group, table in enumerate(request.tables):
            first, blocks = table.take_unsent()
            if len(blocks) == 1:
                self._single_updates += (group, request.slot, first, blocks[0])
            elif blocks:
                updates = np.empty((len(blocks), 4), np.int32)
                updates[:, :2] = group, request.slot
                updates[:, 2] = np.arange(first, first + len(blocks))
                updates[:, 3] = blocks
                self._long_updates.append(updates)

    def admit(self, request: Request, num_cached_tokens: int, adapter: int = NO_ADAPTER) -> None:
        """Note that the request has taken a slot and blocks, and a slot for its adapter. The first
        `num_cached_tokens` tokens in these blocks are already computed."""
        self.add_blocks(request)
        self._starts[request.slot] = num_cached_tokens
        self._admissions.append(
            Admission(
                slot=request.slot,
                sampling_params=request.sampling_params,
                seed=request.seed,
                stop_token_ids=sorted(request.eos_token_ids | request.stop_token_ids),
                bad_word_ids=request.bad_word_ids,
                prompt_token_ids=request.prompt_token_ids
                if request.embeds is None
                else [NO_TOKEN] * request.num_prompt_tokens,
                output_token_ids=request.output_token_ids.copy(),
                adapter=adapter,
            )
        )

    def in_order(self) -> list[Request]:
        """The rows in the order of the step: those with the fewest tokens come first."""
        self._chunks.sort(key=_num_tokens)
        return self.decodes + [request for request, _, _ in self._chunks]

    def build(self, step: int, rows: list[Request]) -> Schedule:
        """Make the step of all rows, which are given in their order."""
        num_decodes = len(self.decodes)
        num_tokens = np.ones(len(rows), np.int32)
        num_tokens[num_decodes:] = [size for _, size, _ in self._chunks]
        num_drafts = None
        if self._has_drafts:
            num_drafts = np.zeros(len(rows), np.int32)
            num_drafts[num_decodes:] = [drafts for _, _, drafts in self._chunks]
        context_lens = np.array([r.num_computed_tokens for r in rows], np.int32)
        lengths = np.array([r.num_tokens for r in rows], np.int32)
        samples = context_lens == lengths
        starts = np.full(len(rows), GO_ON, np.int32)
        slots = np.array([r.slot for r in rows], np.int32)
        for slot, start in self._starts.items():
            starts[slots == slot] = start
        updates = np.array(self._single_updates, np.int32).reshape(-1, 4)
        if self._long_updates:
            updates = np.concatenate([updates, *self._long_updates])
        drafted = {
            feature.name: its
            for feature in self._features
            if (its := feature.draft(rows, num_tokens)) is not None
        }
        late = [its.late_rows for its in drafted.values() if its.late_rows is not None]
        assert len(late) <= 1, "two features have late rows"
        counts = [
            r.sampling_params.logprobs
            for r in rows
            if r.sampling_params.logprobs is not None and r.num_computed_tokens == r.num_tokens
        ]
        return Schedule(
            step=step,
            num_decodes=num_decodes,
            slots=slots,
            num_tokens=num_tokens,
            starts=starts,
            context_lens=context_lens,
            samples=samples,
            token_ids=self._token_ids(),
            num_drafts=num_drafts,
            draft_reads=self.draft_reads,
            moves=self.moves,
            next_tokens=_next_tokens(rows, samples) if self._reads_ahead else None,
            block_updates=updates,
            state_copies=self.state_copies,
            admissions=self._admissions,
            adapter_writes=[write for its in drafted.values() for write in its.adapter_writes],
            encodings=[one for its in drafted.values() for one in its.encodings],
            wants_logprobs=bool(counts),
            late_rows=late[0] if late else None,
            wants_logits=(
                max(counts, default=0) > MAX_STEP_LOGPROBS
                or any(its.wants_logits for its in drafted.values())
            ),
            slices={name: its.slice for name, its in drafted.items()},
            needs_mixed=any(its.needs_mixed for its in drafted.values()),
            carried_from=self.carried_from,
        )

    def _token_ids(self) -> np.ndarray:
        flat = array("i", [self._newest(request, 0) for request in self.decodes])
        for request, size, num_drafts in self._chunks:
            end = request.num_computed_tokens
            if num_drafts:
                flat.append(self._newest(request, num_drafts))
                flat.fromlist([DRAFT_TOKEN] * num_drafts)
            else:
                flat.fromlist(request.known_tokens(end - size, end))
        return np.frombuffer(flat, np.int32)

    @staticmethod
    def _newest(request: Request, num_drafts: int) -> int:
        """The token of a row before its drafts."""
        outputs = request.output_token_ids
        place = request.num_computed_tokens - 1 - num_drafts
        index = place - request.num_prompt_tokens
        if index < 0:
            return request.prompt_token_ids[place]
        if index < len(outputs):
            return outputs[index]
        if request.forced:
            return request.forced[index - len(outputs)]
        # While drafts are in flight the place is the latest possible one, and behind known tokens.
        return CARRIED_TOKEN


def _next_tokens(rows: list[Request], samples: np.ndarray) -> np.ndarray | None:
    """The token behind each row that ends a part of a prompt. A part of one token is a decode."""
    if samples.all():
        return None
    following = np.full(len(rows), NO_TOKEN, np.int32)
    for row in np.flatnonzero(~samples):
        end = rows[row].num_computed_tokens
        (following[row],) = rows[row].known_tokens(end, end + 1)
    return following
