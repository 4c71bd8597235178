"""`jaxllm serve` as a process: it starts, stops in order, and does not outlive its engine."""

import asyncio
import os
import signal
import socket
import time

import pytest

pytestmark = pytest.mark.slow  # engines are started

LONG = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}


def wait_until_refused(port):
    """Until nobody can connect any more."""
    deadline = time.monotonic() + 300
    with pytest.raises(ConnectionRefusedError):
        while time.monotonic() < deadline:
            socket.create_connection(("127.0.0.1", port), timeout=60).close()
            time.sleep(0.02)


def test_sigterm_takes_no_more_and_lets_answers_finish(serving):
    with serving("--shutdown-timeout=300") as server:
        server.wait_until_ready()
        engine_pid = server.engine_pid
        body = LONG | {"max_tokens": 50}
        stream = server.client.stream
        with (
            stream("POST", "/v1/completions", json=body) as short,
            stream("POST", "/v1/completions", json=LONG) as long,
        ):
            lines, endless = short.iter_lines(), long.iter_lines()
            next(lines), next(endless)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
            wait_until_refused(server.port)
            rest = [line for line in endless if line]
            assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert server.process.wait(300) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(engine_pid, 0)
        assert "Traceback" not in server.said()


def test_answers_that_take_longer_than_the_server_waits_for_are_ended(host):
    options = {"shutdown_timeout": 0.2, "sse_keep_alive_interval": 0.05, "access_log": False}
    host.call(host.engine.sleep(0))  # so that none comes to its end
    try:
        with host.serve(**options) as client:
            with client.stream("POST", "/v1/completions", json=LONG) as stream:
                lines = (line for line in stream.iter_lines() if line)
                next(lines)
                client.server.should_exit = True
                rest = [line for line in lines if line != ": keep-alive"]
    finally:
        host.call(host.engine.wake_up())
    assert rest[-1] == "data: [DONE]" and "the server is stopping" in rest[-2]


def test_a_server_that_has_ended_answers_early_has_ended_well(serving):
    with serving("--shutdown-timeout=0.2") as server:
        server.wait_until_ready()
        with server.client.stream("POST", "/v1/completions", json=LONG) as stream:
            next(stream.iter_lines())
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(300) == 0
        assert "Traceback" not in server.said()


@pytest.mark.parametrize("said", ["", "plan:"])
def test_sigterm_while_it_starts_ends_all_processes(serving, said):
    with serving("--api-server-count=2") as server:
        modules = ("jaxllm.engine.process", "jaxllm.server.frontend_process")
        deadline = time.monotonic() + 300
        while not all(map(server.children, modules)) or said not in server.said():
            assert time.monotonic() < deadline and server.process.poll() is None, server.said()
            time.sleep(0.01)
        children = [pid for module in modules for pid in server.children(module)]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(300) == 128 + signal.SIGTERM
        assert not any(map(serving.runs, children))
        assert "Traceback" not in server.said()


@pytest.mark.parametrize(
    ("num_frontends", "end"),
    [
        (1, signal.SIGKILL),
        pytest.param(2, signal.SIGKILL, marks=pytest.mark.sweep),
        (2, signal.SIGSTOP),
    ],
    ids=["killed, 1 frontend", "killed, 2 frontends", "hangs, 2 frontends"],
)
def test_a_server_without_engine_tells_every_client_and_ends(serving, ask, num_frontends, end):
    flags = (f"--api-server-count={num_frontends}", "--shutdown-timeout=300", "--no-access-log")
    # One that was killed is missed long before.
    heartbeat_s = 4 if end == signal.SIGSTOP else 300
    with serving(*flags, f"--engine-heartbeat-timeout={heartbeat_s}") as server:
        server.wait_until_ready()

        async def one():
            asked = await ask(server.port, LONG)
            return await asked.rest()

        async def all_of_them():
            asked = [asyncio.create_task(one()) for _ in range(12)]  # some run, most wait
            while (
                server.metric("num_requests_running") + server.metric("num_requests_waiting") < 12
            ):
                await asyncio.sleep(0.05)
            os.kill(server.engine_pid, end)
            async with asyncio.timeout(200):
                return await asyncio.gather(*asked)

        for answer in asyncio.run(all_of_them()):
            assert '"code":503' in answer and "the engine has ended" in answer
        assert server.process.wait(200) == 1
        assert ("has given no sign of life" in server.said()) == (end == signal.SIGSTOP)


def test_who_comes_when_the_engine_has_ended_is_told(make_host, engine_options, monkeypatch):
    monkeypatch.setattr("jaxllm.server.run._SHOW_DEATH_S", 300.0)  # time enough for all who come
    host = make_host(engine_options)
    with host.serve(access_log=False) as client:
        os.kill(host.engine._process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 200
        while client.get("/health").status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert client.get("/ready").status_code == 503
        refused = client.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503 and "the engine has ended" in refused.text


def test_a_rank_that_follows_opens_no_port_and_ends_quietly(serving):
    hosts = ("-tp=2", "--nnodes=2", f"--master-port={serving.free_port()}")
    with (
        serving(*hosts, "--node-rank=0") as first,
        serving(*hosts, "--node-rank=1") as second,
    ):
        first.wait_until_ready()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", second.port), timeout=60)
        # Rank 0 decides when both end, and needs the other one until then.
        second.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 300
        while "rank 0 says when this one ends" not in second.said():
            assert time.monotonic() < deadline and second.process.poll() is None, second.said()
            time.sleep(0.05)
        body = {"prompt": "Once", "max_tokens": 4, "ignore_eos": True}
        answer = first.client.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 4
        first.process.send_signal(signal.SIGTERM)
        assert (first.process.wait(300), second.process.wait(300)) == (0, 0)
        assert "Traceback" not in second.said()


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(serving):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with serving(f"--port={taken.getsockname()[1]}") as server:
            server.process.wait(300)
    assert server.process.returncode == 2
    assert "cannot listen at 127.0.0.1: Address already in use" in server.said()
    assert "plan:" not in server.said()


def test_flags_that_do_not_go_together_are_refused(serving):
    with serving("--tool-call-parser=hermes") as server:
        server.process.wait(300)
    assert server.process.returncode == 2
    assert "enable_auto_tool_choice and tool_call_parser need each other" in server.said()
