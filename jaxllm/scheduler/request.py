"""A request as the scheduler sees it, from its arrival to its end.

Progress is three numbers. `num_tokens` counts the prompt and every output token that is known or
on its way; `num_computed_tokens` of them have been dispatched to the device; the difference is
what the request still wants. A step that computes the newest token also samples the next one,
which is *in flight* (counted in `num_tokens`, absent from `output_token_ids`) until its id arrives.
"""

import copy
import enum
import sys

from jaxllm.messages import EngineRequest, FinishReason, RequestStats
from jaxllm.scheduler.kv.tables import BlockTable

NO_LANE = -1


class RequestStatus(enum.IntEnum):
    """Where a request is. It is in exactly one place."""

    WAITING = 0  # in the waiting queue, could be admitted
    PARKED = 1  # must not be admitted yet: its leader's prompt or its own token is under way
    RUNNING = 2  # has a slot and blocks
    FINISHED = 3


class Request:
    """One unfinished request. A scheduling policy may read `request_id`, `priority`,
    `arrival_time`, `num_prompt_tokens`, `max_tokens` and `sampling_params`; the rest is the
    scheduler's own."""

    __slots__ = (
        "arrival_time",
        "bad_word_ids",
        "block_hashes",
        "eos_token_ids",
        "followers",
        "has_new_stats",
        "has_taken_over_blocks",
        "hash_root",
        "lane",
        "max_num_tokens",
        "max_tokens",
        "min_tokens",
        "next_block_at",
        "num_cache_bars",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_counted_prompt_tokens",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_tokens",
        "order",
        "output_token_ids",
        "priority",
        "prompt_token_ids",
        "request_id",
        "room",
        "sampled_in",
        "sampling_params",
        "seed",
        "slot",
        "stats",
        "status",
        "stop_token_ids",
        "tables",
    )

    def __init__(self, message: EngineRequest, *, hash_root: bytes | None = None) -> None:
        params = message.sampling_params
        self.request_id = message.request_id
        self.prompt_token_ids = message.prompt_token_ids
        self.output_token_ids: list[int] = []
        self.sampling_params = params
        self.seed = message.seed
        self.max_tokens = message.max_tokens
        self.min_tokens = params.min_tokens
        self.eos_token_ids = frozenset(message.eos_token_ids)
        self.stop_token_ids = frozenset(message.stop_token_ids)
        self.bad_word_ids = message.bad_word_ids
        self.priority = message.priority
        self.arrival_time = message.arrival_time

        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens
        self.max_num_tokens = self.num_prompt_tokens + message.max_tokens
        self.num_computed_tokens = 0
        self.num_counted_prompt_tokens = 0  # up to where the statistics have them
        # How many features want it to compute its tokens itself, and not to find them cached.
        self.num_cache_bars = 0

        self.status = RequestStatus.WAITING
        self.order: tuple = ()  # set once, by the scheduling policy
        self.slot = -1
        self.lane = NO_LANE  # see `lanes`, which owns this and the next
        self.sampled_in = -1  # the step that samples the newest token
        self.followers: list[Request] = []  # parked until this request's prompt is dispatched
        self.num_cached_tokens = 0  # found in the prefix cache when first admitted
        self.stats = RequestStats(replica=message.replica)
        self.has_new_stats = True  # the next output carries them

        # Owned by KVCacheManager. Hashes outlive a preemption; blocks do not.
        self.tables: tuple[BlockTable, ...] = ()  # by group; empty unless it runs
        self.room = 0  # tokens that the tables of all groups hold
        self.hash_root = hash_root  # None: this request shares no blocks
        self.block_hashes: list[bytes] = []
        self.num_registered_blocks = 0
        self.has_taken_over_blocks = False  # that others have filled, when it was admitted last
        # Computed tokens that fill the next block to register, or leave one behind a window.
        self.next_block_at = sys.maxsize

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose ids the host has."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_in_flight(self) -> int:
        """Sampled tokens whose ids have not arrived yet."""
        return self.num_tokens - self.num_known_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def known_tokens(self, start: int, end: int) -> list[int]:
        """Return the tokens at positions [start, end), all of which must be known."""
        num_prompt = self.num_prompt_tokens
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        outputs = self.output_token_ids[max(start - num_prompt, 0) : end - num_prompt]
        return self.prompt_token_ids[start:] + outputs if start < num_prompt else outputs

    def count_prompt_tokens(self, n: int) -> int:
        """Return how many of the last n computed tokens are of the prompt and new: they count once,
        and not when they are computed again after a preemption."""
        end = min(self.num_computed_tokens, self.num_prompt_tokens)
        start = max(self.num_computed_tokens - n, self.num_counted_prompt_tokens)
        self.num_counted_prompt_tokens = max(end, self.num_counted_prompt_tokens)
        return max(end - start, 0)

    def finish_after(self, token: int) -> tuple[FinishReason, int | None] | None:
        """Return why the output token that has just arrived ends the request, and the stop token
        if that is why; None if it goes on."""
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
        """Return a copy: the frontend, which may be in this process, compares it with the next."""
        self.has_new_stats = False
        return copy.copy(self.stats)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"known={self.num_known_tokens}, tokens={self.num_tokens}, "
            f"computed={self.num_computed_tokens}, slot={self.slot}, "
            f"blocks={[len(table.blocks) for table in self.tables]})"
        )
