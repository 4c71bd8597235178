"""Several frontends answer as one does, and count, refuse and end together."""

import asyncio
import contextlib
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import httpx
import msgspec
import pytest

from jaxllm import SamplingParams
from jaxllm.openai.errors import UnavailableError
from jaxllm.server.limits import Admission
from jaxllm.server.peers import NUM_COUNTS, Peers

LONG = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server(serving):
    """Three frontends that take twelve answers in all."""
    flags = ("--api-server-count=3", "--max-queued-requests=8", "--admin-without-key")
    with serving(*flags) as server:
        server.wait_until_ready()
        yield server


def test_limits_hold_for_all_together(tmp_path):
    peers = [Peers.first(str(tmp_path), 3), *(Peers(str(tmp_path), i, 3) for i in (1, 2))]
    first, second, third = (Admission(5, 100, 1000, one) for one in peers)
    with first.answers(2), second.answers(3):
        with pytest.raises(UnavailableError, match="--max-queued-requests"), third.answers(1):
            pass
        assert (third.num_answers, third.num_refused["max_queued_requests"]) == (5, 1)
    with third.answers(5), third.tokens(60), first.tokens(40), second.body() as admit:
        for num in (400, 600):  # it comes in parts
            admit(num)
        with pytest.raises(UnavailableError, match="--max-queued-tokens"), second.tokens(1):
            pass
        with pytest.raises(UnavailableError, match="--max-queued-bytes"), first.body() as more:
            more(1)
    assert [peers[0].total(kind) for kind in range(NUM_COUNTS)] == [0, 0, 0]


@contextlib.contextmanager
def stopped(processes):
    """Processes that do nothing meanwhile."""
    try:
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        while any(state_of(pid) != "T" for pid in processes):
            time.sleep(0.01)
        yield
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)


def state_of(pid):
    _, _, after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return after_name.split()[0]


@pytest.mark.slow
def test_answers_are_those_of_one_process_and_all_are_counted(server, ask, llm):
    bodies = [
        {"prompt": "Once upon" * (1 + i % 3), "max_tokens": 5 + i, "seed": i, "ignore_eos": True}
        for i in range(10)
    ]
    expected = llm.generate(
        [body["prompt"] for body in bodies],
        [
            SamplingParams(seed=b["seed"], max_tokens=b["max_tokens"], ignore_eos=True)
            for b in bodies
        ],
        use_tqdm=False,
    )

    async def one(body):
        return await (await ask(server.port, body)).rest()

    async def all_of_them():
        return await asyncio.gather(*map(one, bodies))

    frontends = {server.process.pid, *server.children("jaxllm.server.frontend_process")}
    for frontend in frontends:
        with stopped(frontends - {frontend}):  # who is awake first would take all connections
            answers = asyncio.run(all_of_them())
        for answer, output in zip(answers, expected, strict=True):
            text = msgspec.json.encode(output.outputs[0].text).decode()
            assert f'"text":{text}' in answer
    served_by = re.findall(r"^(.*)INFO .*POST /v1/completions", server.said(), re.M)
    assert sorted(Counter(served_by).values()) == [10, 10, 10]
    num_tokens = 3 * sum(body["max_tokens"] for body in bodies)
    for _ in range(6):  # whoever is asked
        assert server.metric("request_success_total") == 30
        assert server.metric("e2e_request_latency_seconds_count") == 30
        assert server.metric("request_generation_tokens_sum") == num_tokens
        assert server.metric("generation_tokens_total") == num_tokens
    # Who only looks how the server is fills no log, unless there is something wrong.
    refused = server.client.get("/metrics?", headers={"Host": "evil.example"})
    assert refused.status_code == 403
    looks = re.findall(r"GET /(?:metrics|ready)\S* .*", server.said())
    assert len(looks) == 1 and "403" in looks[0]


@pytest.mark.slow
def test_what_is_above_the_limit_of_all_is_refused(server, ask):
    # Asleep: none that is let in comes to its end, however long the last one takes to come.
    assert server.client.post("/sleep?level=0").status_code == 200

    async def use():
        waiting, refused = set(), []
        async with asyncio.timeout(300):
            # Again and again: two that come at once may both be refused, with room for one.
            while server.metric("num_requests_waiting") < 12:
                waiting |= {asyncio.create_task(ask(server.port, LONG)) for _ in range(28)}
                done, waiting = await asyncio.wait(waiting, timeout=1)
                refused += [one.result() for one in done]
            while len(waiting) > 12:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                refused += [one.result() for one in done]
        assert len(waiting) == 12
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return [await one.rest() for one in refused]

    answers = asyncio.run(use())
    assert len(answers) >= 28 - 12
    for answer in answers:
        assert "retry-after: 1" in answer and "--max-queued-requests" in answer
    assert server.client.post("/wake_up").status_code == 200
    server.wait_until_idle()
    assert server.metric("admission_rejections_total") == len(answers)


@pytest.mark.slow
def test_whoever_is_asked_ends_the_requests_of_all(server, ask):
    async def end_all():
        async with httpx.AsyncClient(base_url=server.client.base_url, timeout=300) as client:
            asked = [await ask(server.port, LONG) for _ in range(4)]
            body = (await client.post("/abort_requests", json={})).json()
        return body, [[data async for data in one.events()] for one in asked]

    body, answers = asyncio.run(end_all())
    assert body == {"num_aborted": 4}
    assert all("was aborted" in events[-2] for events in answers)


@pytest.mark.slow
def test_sigterm_lets_all_of_them_finish(serving, ask):
    with serving("--api-server-count=2") as server:
        server.wait_until_ready()
        children = server.children("jaxllm.server.frontend_process")

        async def use():
            asked = await asyncio.gather(
                *(ask(server.port, LONG | {"max_tokens": 100}) for _ in range(4))
            )
            server.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*(one.rest() for one in asked))

        for answer in asyncio.run(use()):
            assert '"finish_reason":"length"' in answer and answer.count("[DONE]") == 1
        assert server.process.wait(300) == 0
        assert server.said().count("stopping; ") == 2
        assert "Traceback" not in server.said()
    assert not any(map(serving.runs, children))


@pytest.mark.slow
def test_a_lost_frontend_ends_the_server_when_the_others_have_finished(serving, ask):
    with serving("--api-server-count=2") as server:
        server.wait_until_ready()
        engine = server.engine_pid
        (other,) = server.children("jaxllm.server.frontend_process")

        async def use():
            newest = {}  # of each of the two, so that both have most of their answer before them
            while len(newest) < 2:
                asked = await ask(server.port, LONG | {"max_tokens": 1000})
                is_of_other = f"frontend 1: INFO .*:{asked.port} "
                frontend = 1 if re.search(is_of_other, server.said()) else 0
                if frontend in newest:
                    newest[frontend].leave()
                newest[frontend] = asked
            os.kill(other, signal.SIGKILL)
            with contextlib.suppress(ConnectionResetError):
                assert "[DONE]" not in await newest[1].rest()
            return await newest[0].rest()

        answer = asyncio.run(use())
        assert '"finish_reason":"length"' in answer and answer.count("[DONE]") == 1
        assert server.process.wait(300) == 1
        assert f"frontend 1 has ended with status {-signal.SIGKILL}" in server.said()
    assert not serving.runs(engine)


@pytest.mark.slow
def test_kill_9_of_the_first_frontend_leaves_no_process(serving, ask):
    # They end because it is gone, and not because they miss signs of life.
    with serving("--api-server-count=2", "--engine-heartbeat-timeout=0") as server:
        server.wait_until_ready()
        children = [server.engine_pid, *server.children("jaxllm.server.frontend_process")]
        assert len(children) == 2

        async def use():
            await ask(server.port, LONG)
            os.kill(server.process.pid, signal.SIGKILL)
            async with asyncio.timeout(300):
                while any(map(serving.runs, children)):
                    await asyncio.sleep(0.05)

        asyncio.run(use())
