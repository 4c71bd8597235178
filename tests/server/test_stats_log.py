"""The line of log that says how the engine is."""

import asyncio

import pytest

from jaxllm import SamplingParams
from jaxllm.metrics.stats import EngineStats
from jaxllm.server.stats_log import log_stats, state_line

BEFORE = EngineStats(
    num_prompt_tokens=100,
    num_generation_tokens=50,
    prefix_cache_queries=100,
    prefix_cache_hits=90,
    num_preemptions=1,
    group_blocks=[200],
    group_blocks_used=[0],
)


def after(**fields):
    return EngineStats(
        group_blocks=[200],
        group_blocks_used=[25],
        num_requests_running=3,
        num_requests_waiting=2,
        num_prompt_tokens=150,
        num_generation_tokens=300,
        **{
            "prefix_cache_queries": 180,
            "prefix_cache_hits": 110,
            "num_preemptions": 1,
            **fields,
        },
    )


def test_the_line_says_what_was_done_since_the_last_one():
    assert state_line(BEFORE, after(), 10.0) == (
        "Avg prompt throughput: 5.0 tokens/s, Avg generation throughput: 25.0 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, KV cache usage: 12.5%, Prefix cache hit rate: 25.0%"
    )


def test_the_hit_rate_of_all_stands_in_when_nothing_was_looked_up():
    line = state_line(BEFORE, after(prefix_cache_queries=100, prefix_cache_hits=90), 10.0)
    assert line.endswith("Prefix cache hit rate: 90.0%")


def test_what_should_not_be_is_said_only_when_it_is():
    line = state_line(BEFORE, after(num_preemptions=3, num_compiles_after_warmup=2), 10.0)
    assert line.endswith(", Preemptions: 2, Compiled late: 2 programs")


@pytest.mark.slow
def test_an_engine_at_work_is_logged_and_an_idle_one_is_not(host, caplog):
    async def work():
        logging = asyncio.create_task(log_stats(host.engine, every_s=0.01))
        await asyncio.sleep(0.5)
        num_before = len(lines())
        params = SamplingParams(max_tokens=50, ignore_eos=True)
        async for _ in host.engine.generate("Once", params, "logged"):
            pass
        while not lines()[num_before:]:
            await asyncio.sleep(0.01)
        logging.cancel()
        return num_before

    def lines():
        return [one.message for one in caplog.records if "Avg generation" in one.message]

    host.wait_until_idle()
    assert host.call(work()) == 0
    assert "KV cache usage: " in lines()[0]
