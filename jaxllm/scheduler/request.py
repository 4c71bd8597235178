"""A request as the scheduler sees it, from its arrival to its end.

Two numbers are its progress. `num_tokens` counts the tokens of the prompt and every output token
that is known or in flight. `num_computed_tokens` of them have been dispatched to the device; the
others are still to be computed. A step that computes the newest token also samples the next one.
That token is *in flight* until its id arrives: `num_tokens` counts it, `output_token_ids` lacks it.

A step may also compute drafts of the tokens after the newest one. Until the step comes back, both
numbers count the drafts as if they were accepted; `num_uncertain` is how many they are.

A grammar may leave the token in flight no choice, nor those behind it. They are *forced*: no step
samples those behind it, and `num_tokens` counts them from the moment that they are known to come.
They become outputs together with the token in flight. If a row has drafts, and the grammar decides
which of them are right, they are *settled* before the step comes back.
"""

import copy
import enum
import sys

from jaxllm.messages import EngineRequest, FinishReason, RequestStats
from jaxllm.scheduler.kv.tables import BlockTable, PendingSnapshot

NO_LANE = -1


class RequestStatus(enum.IntEnum):
    """Where a request is. It is in exactly one place."""

    WAITING = 0  # in the waiting queue: it may be admitted
    SWAPPED = 1  # there, too, after a preemption: what it had computed may be on the host
    # Not to be admitted yet: it waits for its leader's prompt, for a feature, or for its own token.
    PARKED = 2
    RUNNING = 3  # with a slot and blocks
    FINISHED = 4


class Request:
    """One unfinished request. A scheduling policy may read `request_id`, `priority`,
    `arrival_time`, `num_prompt_tokens`, `max_tokens` and `sampling_params`; the rest is the
    scheduler's own."""

    __slots__ = (
        "adapter",
        "arrival_time",
        "bad_word_ids",
        "block_hashes",
        "draft_gain",
        "draft_pause",
        "embeds",
        "eos_token_ids",
        "error",
        "followers",
        "forced",
        "gives_blocks",
        "grammar",
        "has_new_stats",
        "has_taken_over_blocks",
        "hash_root",
        "images",
        "lane",
        "max_num_tokens",
        "max_tokens",
        "min_tokens",
        "next_block_at",
        "next_draft_pause",
        "num_cache_bars",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_counted_prompt_tokens",
        "num_draft_read",
        "num_drafts",
        "num_holds",
        "num_loaded_blocks",
        "num_prompt_tokens",
        "num_proposed",
        "num_registered_blocks",
        "num_tokens",
        "num_uncertain",
        "order",
        "output_token_ids",
        "parts_at",
        "passed_snapshot",
        "pooling_task",
        "priority",
        "prompt_token_ids",
        "proposal",
        "request_id",
        "room",
        "sampled_in",
        "sampling_params",
        "seed",
        "settled",
        "slot",
        "snapshots",
        "source",
        "stats",
        "status",
        "stop_token_ids",
        "tables",
    )

    def __init__(self, message: EngineRequest, *, hash_root: bytes | None = None) -> None:
        params = message.sampling_params
        self.request_id = message.request_id
        self.prompt_token_ids = message.prompt_token_ids
        self.images = message.images  # their pixels are kept for a request that computes them again
        self.embeds = message.embeds  # likewise
        self.output_token_ids: list[int] = []
        self.sampling_params = params
        self.seed = message.seed
        self.max_tokens = message.max_tokens
        self.min_tokens = params.min_tokens
        self.eos_token_ids = frozenset(message.eos_token_ids)
        self.stop_token_ids = frozenset(message.stop_token_ids)
        self.bad_word_ids = message.bad_word_ids
        self.grammar = message.grammar
        self.adapter = message.adapter
        self.gives_blocks = message.gives_blocks
        self.source = message.source
        self.error: str | None = None  # why it ends in place of running, set by a feature
        self.pooling_task = message.pooling_task
        self.priority = message.priority
        self.arrival_time = message.arrival_time

        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens
        self.max_num_tokens = self.num_prompt_tokens + message.max_tokens
        self.num_computed_tokens = 0
        self.num_uncertain = 0
        # All tokens in flight, and those that follow them for sure; empty: some are not known.
        self.forced: list[int] = []
        # How many drafts of a row in flight are settled, and how many of these are refused.
        self.settled: tuple[int, int] | None = None
        self.num_counted_prompt_tokens = 0  # the statistics have counted this many
        # How many features bar it from the prefix cache: it must compute its tokens itself.
        self.num_cache_bars = 0
        self.num_holds = 0  # what it waits for, parked, before it may run the first time

        self.status = RequestStatus.WAITING
        self.order: tuple = ()  # set once, by the scheduling policy
        self.slot = -1
        self.lane = NO_LANE  # `lanes` owns this field and the next
        self.sampled_in = -1  # the step that samples the newest token
        self.followers: list[Request] = []  # parked until this request's prompt is dispatched
        self.num_cached_tokens = 0  # found in the prefix cache when first admitted
        self.stats = RequestStats(replica=message.replica)
        self.has_new_stats = True  # the next output carries the stats

        # Owned by `speculation`: the drafter's proposal in the latest known step, what drafts bring
        # on average, and steps without drafts until they are tried again.
        self.num_proposed = 0
        self.proposal: list[int] = []  # its tokens, if the request has a grammar
        self.num_drafts = 0  # of its newest row
        self.num_draft_read = 0  # what a draft model has read of it for sure
        self.draft_gain = 1.0
        self.draft_pause = 0
        self.next_draft_pause = 0

        # Owned by KVCacheManager. Hashes outlive a preemption; blocks do not.
        self.tables: tuple[BlockTable, ...] = ()  # by group; empty unless the request runs
        self.room = 0  # how many tokens the tables of every group have blocks for
        self.hash_root = hash_root  # None: this request shares no blocks
        self.block_hashes: list[bytes] = []
        self.num_registered_blocks = 0
        self.num_loaded_blocks = 0  # of its last admission: the most that a group got from the host
        # Whether its last admission took over blocks that other requests had filled.
        self.has_taken_over_blocks = False
        # At this number of computed tokens a block can be registered, or falls behind a window.
        self.next_block_at = sys.maxsize

        # Owned by `kv.snapshots`: places of snapshots that are not findable yet, the newest of
        # those that are, if it is at the stride, and where computed blocks without snapshots end.
        self.snapshots: list[PendingSnapshot] = []
        self.passed_snapshot: bytes | None = None
        self.parts_at = 0

    def force(self, tokens: list[int]) -> None:
        """Note that the tokens in flight are the first of these, and that the others follow."""
        num_in_flight = self.num_in_flight
        self.forced = tokens[: num_in_flight + self.max_num_tokens - self.num_tokens]
        self.num_tokens += len(self.forced) - num_in_flight

    def take_forced(self, num_arrived: int) -> list[int]:
        """Return the tokens that follow those in flight without a choice, now that these are
        here."""
        tokens, self.forced = self.forced[num_arrived:], []
        return tokens

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of a row in flight as what they are. One that is preempted has computed
        nothing."""
        refused = num_drafts - num_accepted
        self.num_tokens -= refused
        self.num_uncertain -= num_drafts
        if self.status is RequestStatus.RUNNING:
            self.num_computed_tokens -= refused

    def settle(self, num_drafts: int, num_accepted: int) -> None:
        """Note which drafts of its newest row are right, before the step comes back."""
        self.count_drafts(num_drafts, num_accepted)
        self.settled = num_drafts, num_drafts - num_accepted

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose ids the host has."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_in_flight(self) -> int:
        """Sampled tokens whose ids have not arrived yet, at most."""
        return self.num_tokens - self.num_known_tokens

    @property
    def num_certain_tokens(self) -> int:
        """How many tokens are computed at least."""
        return self.num_computed_tokens - self.num_uncertain

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def known_tokens(self, start: int, end: int) -> list[int]:
        """Return the tokens at positions [start, end), all of which must be known or forced."""
        num_prompt = self.num_prompt_tokens
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        outputs = self.output_token_ids[max(start - num_prompt, 0) : end - num_prompt]
        if self.forced and end > (num_known := self.num_known_tokens):
            outputs += self.forced[max(start - num_known, 0) : end - num_known]
        return self.prompt_token_ids[start:] + outputs if start < num_prompt else outputs

    def count_prompt_tokens(self, n: int) -> int:
        """Return how many of the last n computed tokens are prompt tokens that were not counted
        before. A prompt token that is computed again after a preemption does not count twice."""
        end = min(self.num_computed_tokens, self.num_prompt_tokens)
        start = max(self.num_computed_tokens - n, self.num_counted_prompt_tokens)
        self.num_counted_prompt_tokens = max(end, self.num_counted_prompt_tokens)
        return max(end - start, 0)

    def take_tokens(self, tokens: list[int]) -> tuple[FinishReason, int | None] | None:
        """Add tokens to the output, and return what `finish_after` says of the last. If one of them
        ends the request, remove those after it from the list."""
        for count, token in enumerate(tokens, 1):
            self.output_token_ids.append(token)
            finish = self.finish_after(token)
            if finish is not None:
                del tokens[count:]
                return finish
        return None

    def finish_after(self, token: int) -> tuple[FinishReason, int | None] | None:
        """Return the finish reason if the newest output token ends the request, and the token if it
        is one of `stop_token_ids`. Return None if the request goes on."""
        num_outputs = len(self.output_token_ids)
        if num_outputs >= self.min_tokens:
            if token in self.eos_token_ids:
                return FinishReason.STOP, None
            if token in self.stop_token_ids:
                return FinishReason.STOP, token
        if num_outputs >= self.max_tokens:
            return FinishReason.LENGTH, None
        return None

    def report_stats(self) -> RequestStats:
        """Return a copy: a frontend in this process compares one copy with the next."""
        self.has_new_stats = False
        return copy.copy(self.stats)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"known={self.num_known_tokens}, tokens={self.num_tokens}, "
            f"computed={self.num_computed_tokens}, slot={self.slot}, "
            f"blocks={[len(table.blocks) for table in self.tables]})"
        )
