"""`jaxllm route`: one engine computes prompts, and another answers, each in a process of its own. A
client sees no difference."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time

import httpx
import pytest
from starlette.requests import ClientDisconnect

from jaxllm.server import route
from tests.ports import free_port

PROMPT = "Once upon a time there was a princess who lived in a castle by the sea, " * 3
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "seed": 1}
BODIES = {
    "/v1/chat/completions": CHAT | {"logprobs": True, "top_logprobs": 2},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 12, "seed": 2, "n": 2, "logprobs": 1},
}


@pytest.fixture(scope="module")
def engines(new_host, engine_options, llm, tmp_path_factory):
    """Two engines: one computes prompts, one answers."""
    secret = tmp_path_factory.mktemp("secret") / "secret"
    secret.write_text("known to few of us")
    options = engine_options | {"kv_offloading_size": 0.02, "kv_secret_file": str(secret)}
    with contextlib.ExitStack() as stack:
        hosts = [
            new_host(options | {"kv_role": role, "kv_timeout": 100.0})
            for role in ("kv_producer", "kv_consumer")
        ]
        for host in hosts:
            stack.callback(host.close)
        yield hosts


@contextlib.contextmanager
def routing(prefill, decode):
    """Start the command; yield a client of it."""
    port = free_port()
    command = [sys.executable, "-m", "jaxllm.cli.main", "route", f"--port={port}"]
    urls = ["--prefill", *map(_url, prefill), "--decode", *map(_url, decode)]
    process = subprocess.Popen([*command, *urls])
    deadline = time.monotonic() + 300
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            break
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            yield client
    finally:
        process.terminate()
        assert process.wait(300) == -15


def _url(server):
    return server if isinstance(server, str) else f"http://127.0.0.1:{server.port}"


def counts(client):
    lines = client.get("/metrics").text.splitlines()
    start = 'jaxllm_route_requests_total{way="'
    return {
        line.removeprefix(start).partition('"')[0]: float(line.split()[-1])
        for line in lines
        if line.startswith(start)
    }


def taken(server):
    (line,) = [one for one in server.get("/metrics").text.splitlines() if _is_taken(one)]
    return float(line.split()[-1])


def _is_taken(line):
    return line.startswith("jaxllm:kv_taken_blocks_total")


def asked(client, path, **more):
    body = client.post(path, json=BODIES[path] | more).raise_for_status().json()
    return [choice | {"logprobs": choice["logprobs"]} for choice in body["choices"]]


def test_a_prompt_is_computed_by_one_and_answered_by_another(engines):
    giver, taker = engines
    with giver.serve() as first, taker.serve() as second:
        before = {path: asked(second, path) for path in BODIES}
        taker.call(taker.engine.reset_prefix_cache())
        with routing([first], [second]) as client:
            # A giver that is slow may have copied no block when it is asked the first time.
            assert {path: asked(client, path) for path in BODIES} == before
            giver.wait_until_idle()
            taker.call(taker.engine.reset_prefix_cache())
            num_taken = taken(second)
            assert {path: asked(client, path) for path in BODIES} == before
            assert taken(second) > num_taken + 4
            body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
            with client.stream("POST", "/v1/chat/completions", json=body) as stream:
                assert stream.headers["content-type"].startswith("text/event-stream")
                assert list(stream.iter_lines())[-2] == "data: [DONE]"
            assert counts(client) == {"handed_over": 5, "computed_alone": 0, "passed_on": 0}
            # What is refused says why, with the status of an engine.
            refused = client.post("/v1/completions", json={"prompt": "a", "temperature": -1})
            assert refused.status_code == 400 and "temperature" in refused.text
            assert client.get("/v1/models").json() == second.get("/v1/models").json()
            assert client.get("/v1/none").status_code == 404


def test_what_one_cannot_do_the_other_does(engines):
    _, taker = engines
    with taker.serve() as server:
        expected = asked(server, "/v1/completions")
        for prefill in ("http://127.0.0.1:9", server):  # nobody is there; one that gives nothing
            with routing([prefill], ["http://127.0.0.1:9", server]) as client:
                answer = client.post("/v1/completions", json=BODIES["/v1/completions"])
                if prefill is server:  # a mistake of who set it up: it is told
                    assert answer.status_code == 400 and "kv_producer" in answer.text
                else:
                    assert answer.json()["choices"] == expected
                    assert counts(client)["computed_alone"] == 1
        with routing(["http://127.0.0.1:9"], ["http://127.0.0.1:9"]) as client:
            assert client.get("/v1/models").status_code == 503


def test_an_answer_ends_with_its_client_even_before_its_first_piece():
    ended = []

    class Answer:
        status, headers = 200, {}

        async def pieces(self):
            yield b"never read"

        def end(self):
            ended.append(True)

    async def leaves(message):
        raise OSError

    async def run():
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        await route._PassedOn(Answer())(scope, None, leaves)

    with pytest.raises(ClientDisconnect):
        asyncio.run(run())
    assert ended == [True]
