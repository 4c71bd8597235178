"""One line of log about the engine, now and then, while there is something to say."""

import asyncio
import time

from jaxllm.frontend.async_llm_engine import AsyncLLMEngine
from jaxllm.logging import init_logger

logger = init_logger(__name__)

_EVERY_S = 10.0


async def log_stats(engine: AsyncLLMEngine) -> None:
    """Log until cancelled, or the engine has ended."""
    before, then = await engine.stats(), time.monotonic()
    was_idle = True
    while engine.is_running:
        await asyncio.sleep(_EVERY_S)
        stats, now = await engine.stats(), time.monotonic()
        is_idle = stats.num_steps == before.num_steps
        if not (is_idle and was_idle):
            seconds = now - then
            logger.info(
                "%.1f prompt and %.1f output tokens per second; %d running, %d waiting; "
                "KV cache %.1f%% used, prefix hits %.1f%%",
                (stats.num_prompt_tokens - before.num_prompt_tokens) / seconds,
                (stats.num_generation_tokens - before.num_generation_tokens) / seconds,
                stats.num_requests_running,
                stats.num_requests_waiting,
                100 * stats.kv_cache_usage,
                100 * stats.prefix_cache_hit_rate,
            )
        before, then, was_idle = stats, now, is_idle
