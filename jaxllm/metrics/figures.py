"""The figures of an engine that are published, with their names.

A figure that vLLM has too has vLLM's name, so that dashboards for vLLM find it.
"""

from typing import Literal, NamedTuple

from jaxllm.metrics.stats import EngineStats
from jaxllm.speculative_config import MAX_DRAFTS


class Figure(NamedTuple):
    """One figure of an engine."""

    kind: Literal["counter", "gauge"]
    name: str
    attribute: str  # of EngineStats
    help: str
    labels: dict[str, str]
    place: int | None = None  # in the attribute, if that is a list; beyond its end nothing counts

    def read(self, stats: EngineStats) -> float:
        value = getattr(stats, self.attribute)
        if self.place is not None:
            value = value[self.place] if self.place < len(value) else 0
        return float(value)


def _gauge(name: str, attribute: str, help: str, **labels: str) -> Figure:
    return Figure("gauge", name, attribute, help, labels)


def _counter(name: str, attribute: str, help: str, **labels: str) -> Figure:
    return Figure("counter", name, attribute, help, labels)


_WAITING = "Answers that wait: for room (capacity), or for another answer first (deferred)."
_BY_SOURCE = "Tokens of prompts by where their KV came from."
_HOST = "Seconds that the host spent on steps: planning, packing, taking results in."

FIGURES = (
    _gauge("num_requests_running", "num_requests_running", "Answers in the running batch."),
    _gauge("num_requests_waiting", "num_requests_waiting", "Answers that wait for a place in it."),
    _gauge("num_requests_waiting_by_reason", "num_requests_for_room", _WAITING, reason="capacity"),
    _gauge("num_requests_waiting_by_reason", "num_requests_deferred", _WAITING, reason="deferred"),
    _gauge(
        "num_requests_swapped",
        "num_requests_swapped",
        "Answers that wait, preempted, while the host may have their blocks.",
    ),
    _gauge("kv_offload_blocks", "host_blocks", "Places for blocks on the host."),
    _gauge("kv_offload_blocks_used", "host_blocks_used", "Those of them that are in use."),
    _gauge("kv_cache_usage_perc", "kv_cache_usage", "Share of the KV cache in use; 1 means all."),
    _gauge("kv_blocks", "num_blocks", "Blocks of the KV cache."),
    _gauge("kv_blocks_used", "num_blocks_used", "Those of them that are in use."),
    _gauge("state_snapshots", "num_snapshots", "Places for snapshots of recurrent states."),
    _gauge("state_snapshots_used", "num_snapshots_used", "Those of them that have one."),
    _gauge("overlap", "overlap", "1 if steps are dispatched one ahead of their results, else 0."),
    _gauge("prefix_cache_hit_rate", "prefix_cache_hit_rate", "Found of looked up, since start."),
    _gauge("padding_waste", "padding_waste", "Share of token rows that were padding, since start."),
    _gauge(
        "pipeline_bubble_share",
        "pipeline_bubble_share",
        "Share of pipeline stages that found nothing to run, since start.",
    ),
    _gauge("host_us_per_step", "host_us_per_step", "Microseconds of the host, since start."),
    _counter("prompt_tokens", "num_all_prompt_tokens", "Tokens of prompts, computed or cached."),
    _counter("prompt_tokens_by_source", "num_prompt_tokens", _BY_SOURCE, source="local_compute"),
    _counter("prompt_tokens_by_source", "prefix_cache_hits", _BY_SOURCE, source="local_cache_hit"),
    _counter("prompt_tokens_cached", "prefix_cache_hits", "Tokens of prompts found in the cache."),
    _counter("generation_tokens", "num_generation_tokens", "Tokens generated."),
    _counter("num_preemptions", "num_preemptions", "Answers put back for want of memory."),
    _counter("prompt_images", "num_images", "Images of prompts, and pairs of frames of videos."),
    _counter(
        "encoded_images",
        "num_images_encoded",
        "Images and pairs of frames that the tower has encoded.",
    ),
    _counter(
        "corrupted_requests",
        "num_requests_corrupted",
        "Answers that ended since the model's logits were not finite numbers.",
    ),
    _counter("spec_decode_num_drafts", "num_drafts", "Rows with drafts."),
    _counter("spec_decode_num_draft_tokens", "num_draft_tokens", "Drafts in them."),
    _counter("spec_decode_num_accepted_tokens", "num_accepted_tokens", "Drafts that were right."),
    *(
        Figure(
            "counter",
            "spec_decode_num_accepted_tokens_per_pos",
            "num_accepted_by_place",
            "Drafts that were right, by their place in the row.",
            {"position": str(place)},
            place,
        )
        for place in range(MAX_DRAFTS)
    ),
    _counter("prefix_cache_queries", "prefix_cache_queries", "Tokens looked up in the cache."),
    _counter("prefix_cache_hits", "prefix_cache_hits", "Tokens found there."),
    _counter(
        "external_prefix_cache_queries",
        "external_cache_queries",
        "Tokens that the devices' cache lacked, looked up on the host.",
    ),
    _counter("external_prefix_cache_hits", "external_cache_hits", "Tokens found there."),
    _counter("kv_offload_store_blocks", "host_blocks_stored", "Blocks copied to the host."),
    _counter("kv_offload_load_blocks", "host_blocks_loaded", "Blocks copied back."),
    _counter("kv_offload_read_blocks", "host_blocks_read", "Blocks read from files."),
    _counter(
        "kv_offload_dropped_blocks",
        "host_blocks_dropped",
        "Blocks that were not copied: too many were on their way, or a copy failed.",
    ),
    _counter("kv_taken_blocks", "blocks_taken", "Blocks that came from other engines."),
    _counter(
        "kv_missed_blocks",
        "blocks_not_taken",
        "Blocks that other engines did not give: their tokens are computed.",
    ),
    _counter("kv_given_blocks", "blocks_given", "Blocks that other engines got."),
    _counter(
        "engine_answers_finished", "num_requests_finished", "Answers that the engine is done with."
    ),
    _counter("engine_steps", "num_steps", "Steps of the engine."),
    _counter("engine_step_seconds", "step_s", "Seconds of the engine's loop that had a step."),
    _counter("scheduled_tokens", "num_scheduled_tokens", "Token rows that carried a token."),
    _counter("token_rows", "num_token_rows", "Token rows of steps, padding included."),
    _counter("compiles_after_warmup", "num_compiles_after_warmup", "Programs compiled late."),
    _counter(
        "pipeline_stages_offered", "num_stages_offered", "Stages of the pipeline, at every step."
    ),
    _counter(
        "pipeline_stages_filled", "num_stages_filled", "Those of them that had something to run."
    ),
    _counter("host_seconds", "schedule_s", _HOST, phase="schedule"),
    _counter("host_seconds", "pack_s", _HOST, phase="pack"),
    _counter("host_seconds", "update_s", _HOST, phase="update"),
    _counter("host_seconds", "mask_s", _HOST, phase="mask"),
    _counter(
        "device_wait_seconds", "device_wait_s", "Seconds that the host waited for the device."
    ),
    _counter(
        "device_idle_seconds", "device_idle_s", "Seconds in which work was there and none ran."
    ),
)

EXPERT_TOKENS = "expert_tokens"
EXPERT_TOKENS_HELP = "Tokens that chose an expert of a layer; with --count-expert-tokens."
STEP_TOKENS = "iteration_tokens_total"
STEP_TOKENS_HELP = "Tokens computed in a step."


def step_tokens_buckets(stats: EngineStats) -> dict[str, int]:
    """The number of steps with at most a limit of tokens, by limit. The last is infinite."""
    buckets: dict[str, int] = {}
    count = 0
    last = len(stats.step_sizes) - 1
    for power, num in enumerate(stats.step_sizes):
        count += num
        buckets["+Inf" if power == last else f"{float(1 << power)}"] = count
    return buckets
