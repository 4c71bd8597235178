"""Logs one line about the engine at intervals, unless it is idle.

The words are vLLM's, because scripts search for them.
"""

import asyncio
import time

from jaxllm.frontend.async_llm_engine import AsyncLLMEngine
from jaxllm.logging import init_logger
from jaxllm.metrics.stats import EngineStats
from jaxllm.plural import counted

logger = init_logger(__name__)

_EVERY_S = 10.0


async def log_stats(
    engine: AsyncLLMEngine, every_s: float = _EVERY_S, *, model: str | None = None
) -> None:
    """Log until the task is cancelled or the engine has ended. With a name of the model, each line
    begins with it."""
    head = "" if model is None else f"{model}: "
    before, then = await engine.stats(), time.monotonic()
    was_idle = True
    while engine.is_running:
        await asyncio.sleep(every_s)
        stats, now = await engine.stats(), time.monotonic()
        is_idle = stats.num_steps == before.num_steps
        if not (is_idle and was_idle):
            logger.info("%s%s", head, state_line(before, stats, now - then))
        before, then, was_idle = stats, now, is_idle


def state_line(before: EngineStats, stats: EngineStats, seconds: float) -> str:
    """Describe the work of the last seconds and the current state."""

    def more(name: str) -> int:
        return getattr(stats, name) - getattr(before, name)

    looked_up = more("prefix_cache_queries")
    # The hit rate of this interval; if it has no lookups, of the whole run.
    hit_rate = more("prefix_cache_hits") / looked_up if looked_up else stats.prefix_cache_hit_rate
    parts = [
        f"Avg prompt throughput: {more('num_prompt_tokens') / seconds:.1f} tokens/s",
        f"Avg generation throughput: {more('num_generation_tokens') / seconds:.1f} tokens/s",
        f"Running: {stats.num_requests_running} reqs",
        f"Waiting: {stats.num_requests_waiting} reqs",
        f"KV cache usage: {stats.kv_cache_usage:.1%}",
        f"Prefix cache hit rate: {hit_rate:.1%}",
    ]
    # Report these problems only if they happened.
    if more("num_preemptions"):
        parts.append(f"Preemptions: {more('num_preemptions')}")
    if more("num_compiles_after_warmup"):
        parts.append(f"Compiled late: {counted(more('num_compiles_after_warmup'), 'program')}")
    return ", ".join(parts)
