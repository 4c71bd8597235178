"""More than can be done: what is let in is answered in time, the rest is refused at once, and
nothing piles up, not even for a client that does not read."""

import asyncio
import contextlib
import gc
import json
import os
import re
import socket
import time

import pytest

from jaxllm import SamplingParams
from jaxllm.server.limits import Admission

pytestmark = pytest.mark.slow  # the first one starts an engine

LONG = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 16}
# As many as run and as many as may wait.
NUM_RUNNING, NUM_WAITING = 4, 2
LIMIT = NUM_RUNNING + NUM_WAITING


@pytest.fixture
def limited(host):
    with host.serve(max_queued_requests=NUM_WAITING, access_log=False) as client:
        yield client


async def ten_times_too_many(ask, port):
    """Each client comes again until it is let in."""

    async def client():
        while True:
            asked = await ask(port, SHORT)
            rest = await asked.rest()
            if asked.status == 200:
                return
            assert asked.status == 503 and "retry-after: 1" in rest
            await asyncio.sleep(0.4)

    await asyncio.gather(*(client() for _ in range(10 * LIMIT)))


@pytest.fixture
def overtaken(monkeypatch):
    """Of each answer, how many others ended between its being let in and its end."""
    numbers, admit = [], Admission.answers

    @contextlib.contextmanager
    def counted(self, num):
        with admit(self, num):
            then = len(numbers)
            yield
        numbers.append(len(numbers) - then)

    monkeypatch.setattr(Admission, "answers", counted)
    return numbers


def test_who_is_let_in_does_not_wait_for_all_who_come(host, limited, ask, overtaken):
    assert limited.post("/v1/completions", json=SHORT).status_code == 200  # programs are compiled
    counts = []
    for _ in range(3):
        overtaken.clear()
        asyncio.run(ten_times_too_many(ask, limited.port))
        assert len(overtaken) == 10 * LIMIT
        # Those before it in the queue, and some that end in the same step as it.
        assert max(overtaken) <= LIMIT + NUM_RUNNING, overtaken
        assert host.wait_until_idle().num_blocks_used == 0
        while len(limited.server.server_state.connections) > 1:  # that of `limited` is kept
            time.sleep(0.01)
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[2] - counts[1] < 500, counts  # less than one for each request
    assert host.engine.num_unfinished == 0
    assert limited.post("/v1/completions", json=SHORT).status_code == 200


def test_who_is_not_let_in_hears_it_at_once(host, limited, ask):
    async def use():
        await asyncio.to_thread(host.call, host.engine.sleep(0))  # so that none of them ends
        held = [asyncio.create_task(ask(limited.port, LONG)) for _ in range(LIMIT)]
        while host.engine.num_unfinished < LIMIT:
            await asyncio.sleep(0.01)
        refused = await asyncio.gather(*(ask(limited.port, SHORT) for _ in range(10 * LIMIT)))
        for one in held:
            one.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        return [(one.status, await one.rest()) for one in refused]

    try:
        refused = asyncio.run(use())
    finally:
        host.call(host.engine.wake_up())
    for status, rest in refused:
        assert status == 503 and "retry-after: 1" in rest
    assert host.wait_until_idle().num_blocks_used == 0


def test_for_a_client_that_does_not_read_little_is_kept(host, ask, llm):
    body = LONG | {"seed": 1, "stream": True, "logprobs": 5}

    async def use(server):
        host.call(host.engine.sleep(0))  # nothing is sent before the buffers are small
        try:
            asked = await ask(server.port, body, receive_bytes=4096)
            transport = host.call(transport_to(server.server, asked.port))
            handle = os.dup(transport.get_extra_info("socket").fileno())
            with socket.socket(fileno=handle) as sending:
                sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        finally:
            host.call(host.engine.wake_up())
        host.wait_until_idle()
        assert host.engine.num_unfinished == 1
        num_waiting = transport.get_write_buffer_size()
        return num_waiting, await asked.rest()

    # A sign of life begins the response.
    with host.serve(sse_keep_alive_interval=0.05, access_log=False) as server:
        num_waiting, answer = asyncio.run(use(server))
    events = re.findall("^data: (.*)$", answer, re.M)
    assert sum(map(len, events)) > 4 * num_waiting > 0
    assert events.pop() == "[DONE]"
    assert len(events) < 1000  # of 2000 tokens: the last ones came together
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    params = SamplingParams(seed=1, max_tokens=2000, ignore_eos=True)
    (expected,) = llm.generate([body["prompt"]], params, use_tqdm=False)
    assert text == expected.outputs[0].text


async def transport_to(server, port):
    """The server's end of a connection."""
    transports = [one.transport for one in server.server_state.connections]
    (found,) = [one for one in transports if one.get_extra_info("peername")[1] == port]
    return found
