"""Statistics as plain data, which the scheduler and the engine core fill in."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

# Steps are counted by their size: up to 1 token, 2, 4, ..., 32768, and above.
NUM_STEP_SIZES = 17


@dataclass(slots=True)
class EngineStats:
    """State and totals of one engine. Counters only grow; gauges are as of the last step."""

    # gauges
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_requests_deferred: int = 0  # the waiting ones that could not start even with room
    # Blocks of the KV cache, and the blocks that requests hold, by group of layers.
    group_blocks: list[int] = field(default_factory=list)
    group_blocks_used: list[int] = field(default_factory=list)
    # Snapshots of recurrent layers' states that are kept, and how many there can be.
    num_snapshots: int = 0
    num_snapshots_used: int = 0
    # The names of the adapters of running requests, and of waiting ones.
    adapters_running: list[str] = field(default_factory=list)
    adapters_waiting: list[str] = field(default_factory=list)
    # With a second home of KV blocks: the waiting requests that were preempted and whose blocks may
    # be there, its places for blocks, and those that hold or await one.
    num_requests_swapped: int = 0
    host_blocks: int = 0
    host_blocks_used: int = 0
    overlap: bool = False  # whether steps are dispatched one ahead
    # counters
    num_steps: int = 0
    num_requests_finished: int = 0
    num_prompt_tokens: int = 0  # computed, not found in the cache; once each
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_images: int = 0  # of requests that were admitted
    num_images_encoded: int = 0
    # How often a request found too few free blocks, by group of layers.
    group_shortages: list[int] = field(default_factory=list)
    num_requests_corrupted: int = 0  # requests that ended because their logits were not finite
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    # Of the second home: tokens looked up there and found, blocks copied there, back and from
    # files, and blocks that were not, since too many were on their way or a copy failed.
    external_cache_queries: int = 0
    external_cache_hits: int = 0
    host_blocks_stored: int = 0
    host_blocks_loaded: int = 0
    host_blocks_read: int = 0
    host_blocks_dropped: int = 0
    # Blocks that came from other engines, that did not, and that others got.
    blocks_taken: int = 0
    blocks_not_taken: int = 0
    blocks_given: int = 0
    # Of speculation: rows with drafts, their drafts, those that were accepted, and these by their
    # place in the row.
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_place: list[int] = field(default_factory=list)
    num_scheduled_tokens: int = 0  # token rows that carried a token
    num_token_rows: int = 0  # token rows of the programs that ran
    num_compiles_after_warmup: int = 0
    # Counted at each dispatch: the stages of the pipeline, and how many of them had a step to run
    # that waits for no other. Without a pipeline there is one stage, which always has one.
    num_stages_offered: int = 0
    num_stages_filled: int = 0
    step_sizes: list[int] = field(default_factory=lambda: [0] * NUM_STEP_SIZES)
    # By layer: the tokens that chose each of its experts; empty if they are not counted.
    expert_tokens: dict[int, list[int]] = field(default_factory=dict)
    # seconds
    step_s: float = 0.0  # all calls of `step` with work, including all below
    schedule_s: float = 0.0
    pack_s: float = 0.0
    update_s: float = 0.0
    mask_s: float = 0.0  # masks of late rows, and the dispatch of their sampling
    device_wait_s: float = 0.0  # the host waited for the device
    device_idle_s: float = 0.0  # there was work, and the device had none

    @classmethod
    def total(cls, replicas: Sequence["EngineStats"]) -> "EngineStats":
        """The summed figures of several engines."""
        total = cls()
        for one in dataclasses.fields(cls):
            values = [getattr(stats, one.name) for stats in replicas]
            if one.name.startswith("adapters_"):
                in_all = sorted(set().union(*values))
            elif isinstance(values[0], list):
                in_all = _sums(values)
            elif isinstance(values[0], dict):
                in_all = {key: _sums([its[key] for its in values]) for key in values[0]}
            else:
                in_all = sum(values)
            setattr(total, one.name, in_all)
        total.overlap = all(stats.overlap for stats in replicas)
        return total

    def count_step(self, num_tokens: int) -> None:
        """Count a planned step."""
        self.num_scheduled_tokens += num_tokens
        self.step_sizes[min((num_tokens - 1).bit_length(), NUM_STEP_SIZES - 1)] += 1

    @property
    def num_requests_for_room(self) -> int:
        return self.num_requests_waiting - self.num_requests_deferred

    @property
    def num_all_prompt_tokens(self) -> int:
        return self.num_prompt_tokens + self.prefix_cache_hits

    @property
    def num_blocks(self) -> int:
        return sum(self.group_blocks)

    @property
    def num_blocks_used(self) -> int:
        return sum(self.group_blocks_used)

    @property
    def kv_cache_usage(self) -> float:
        """The usage of the fullest group: requests wait or are preempted for lack of its blocks."""
        shares = zip(self.group_blocks_used, self.group_blocks, strict=True)
        return max((used / blocks for used, blocks in shares), default=0.0)

    @property
    def external_cache_hit_rate(self) -> float | None:
        """The share of what the host was asked for that it had; None: it was asked for nothing."""
        queries = self.external_cache_queries
        return self.external_cache_hits / queries if queries else None

    @property
    def prefix_cache_hit_rate(self) -> float:
        queries = self.prefix_cache_queries
        return self.prefix_cache_hits / queries if queries else 0.0

    @property
    def padding_waste(self) -> float:
        """Share of token rows that were padding."""
        rows = self.num_token_rows
        return 1.0 - self.num_scheduled_tokens / rows if rows else 0.0

    @property
    def pipeline_bubble_share(self) -> float:
        """The share of stages that had nothing to run, since each further step waited for another.

        It is the host's view: a step counts as in flight until its tokens are taken in, and all
        stages count as equally fast."""
        offered = self.num_stages_offered
        return 1.0 - self.num_stages_filled / offered if offered else 0.0

    @property
    def host_us_per_step(self) -> float:
        """Microseconds of scheduling, packing, updating and making masks per step."""
        busy = self.schedule_s + self.pack_s + self.update_s + self.mask_s
        return busy / self.num_steps * 1e6 if self.num_steps else 0.0


def _sums(lists: list[list[int]]) -> list[int]:
    """The sums of the numbers in each place."""
    return list(map(sum, zip(*lists, strict=True)))
