"""Hundreds of clients at once, some of whom leave or are slow: the others get what they asked for,
and in the end nothing is left of any."""

import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from jaxllm import SamplingParams

pytestmark = pytest.mark.slow  # a server is started

BODIES = [
    {"prompt": "Once upon " * (1 + i % 4), "max_tokens": 4 + i, "seed": i, "ignore_eos": True}
    for i in range(16)
]
# Of both processes together: 3 KB for each stream would be more.
TOLERANCE_KB = 2 << 10


def held_by(pids):
    """How many files, sockets among them, and how many threads each process has."""
    return [len(os.listdir(f"/proc/{pid}/{what}")) for pid in pids for what in ("fd", "task")]


def rss_kb(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def server(serving):
    with serving("--no-access-log") as server:
        server.wait_until_ready()
        yield server
        server.process.terminate()
        assert server.process.wait(300) == 0
        assert "stopping; 0 requests are under way" in server.said()
        assert "Traceback" not in server.said()


@pytest.fixture(scope="module")
def expected(llm):
    params = [
        SamplingParams(seed=one["seed"], max_tokens=one["max_tokens"], ignore_eos=True)
        for one in BODIES
    ]
    outputs = llm.generate([one["prompt"] for one in BODIES], params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


async def text_of(asked, pause_s):
    """The text of a stream that is read to its end, with pauses at its beginning."""
    events = [event async for event in slowly(asked.events(), pause_s)]
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert [one["finish_reason"] for one in choices] == [None] * (len(choices) - 1) + ["length"]
    return "".join(one["text"] for one in choices)


async def slowly(events, pause_s):
    num = 0
    async for event in events:
        yield event
        num += 1
        if num < 8:
            await asyncio.sleep(pause_s)


async def one_of_many(server, ask, index):
    """The text of a stream, or None of one that was left in its midst or before it began."""
    asking = ask(server.port, BODIES[index % len(BODIES)] | {"stream": True})
    if index % 9 == 0:
        try:
            asked = await asyncio.wait_for(asking, 0.01 * (index % 10))
        except TimeoutError:
            return None
        asked.leave()
        return None
    asked = await asking
    assert asked.status == 200
    if index % 3 == 0:
        await anext(asked.events())
        asked.leave()
        return None
    return await text_of(asked, 0.05 if index % 10 == 1 else 0)


async def storm(server, ask, expected, num):
    texts = await asyncio.gather(*(one_of_many(server, ask, index) for index in range(num)))
    for index, text in enumerate(texts):
        assert text is None if index % 3 == 0 else text == expected[index % len(expected)]


def test_a_storm_leaves_nothing_behind(server, ask, expected):
    pids = (server.process.pid, server.engine_pid)
    asyncio.run(storm(server, ask, expected, 500))
    server.wait_until_idle()
    time.sleep(1)  # until the last connections have been closed
    held, used = held_by(pids), []
    for _ in range(6):
        asyncio.run(storm(server, ask, expected, 150))
        server.wait_until_idle()
        used.append(sum(map(rss_kb, pids)))
    assert server.metric("kv_cache_usage_perc") == 0
    deadline = time.monotonic() + 300
    while any(now > then for now, then in zip(held_by(pids), held, strict=True)):
        assert time.monotonic() < deadline, (held_by(pids), held)
        time.sleep(0.1)
    assert used[-1] - used[0] < TOLERANCE_KB, used


def test_an_idle_engine_uses_no_core_and_wakes(server):
    pids = (server.process.pid, server.engine_pid)
    server.wait_until_idle()
    before = list(map(cpu_s, pids))
    time.sleep(3)
    used = [now - then for now, then in zip(map(cpu_s, pids), before, strict=True)]
    assert max(used) < 0.6, used  # a loop that spins takes 3
    assert server.client.post("/v1/completions", json=BODIES[0]).status_code == 200
