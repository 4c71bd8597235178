"""`jaxllm serve` as a process: it starts, stops in order, and does not outlive its engine."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

pytestmark = pytest.mark.slow  # engines are started

LONG = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Process:
    """A server in a process of its own."""

    def __init__(self, engine_options, *flags):
        self.port = free_port()
        options = dict(engine_options)
        command = [sys.executable, "-m", "jaxllm.cli.main", "serve", options.pop("model")]
        command += [f"--port={self.port}", "--served-model-name=tiny", *flags]
        del options["enforce_eager"]
        command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        self.process = subprocess.Popen(
            [*command, "--enforce-eager"], stderr=subprocess.PIPE, text=True
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def wait_until_ready(self):
        deadline = time.monotonic() + 120
        while True:
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < deadline
            try:
                if self.client.get("/ready").status_code == 200:
                    return
            except httpx.ConnectError:
                time.sleep(0.1)

    @property
    def engine_pid(self):
        children = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(self.process.pid)],
            capture_output=True,
            text=True,
        ).stdout
        return int(re.search(r"(\d+) .*jaxllm\.engine\.process", children)[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def wait_until_refused(port):
    """Until nobody can connect any more."""
    deadline = time.monotonic() + 30
    with pytest.raises(ConnectionRefusedError):
        while time.monotonic() < deadline:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            time.sleep(0.02)


def test_sigterm_takes_no_more_and_lets_answers_finish_for_a_while(engine_options, llm):
    with Process(engine_options, "--shutdown-timeout=2") as server:
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
            assert rest[-1] == "data: [DONE]"
            # It ran to its end within the time, or was ended.
            ends = ('"finish_reason":"length"', "the server is stopping")
            assert any(end in rest[-2] for end in ends)
        assert server.process.wait(30) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(engine_pid, 0)
        assert "Traceback" not in server.process.stderr.read()


def test_a_server_without_engine_says_so_and_ends(engine_options, llm):
    with Process(engine_options, "--shutdown-timeout=30") as server:
        server.wait_until_ready()
        with server.client.stream("POST", "/v1/completions", json=LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(server.engine_pid, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert '"code":503' in rest[-2] and "the engine has ended" in rest[-2]
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/ready").status_code == 503
        response = server.client.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 503
        assert server.process.wait(30) == 1


def test_a_rank_that_follows_opens_no_port_and_ends_quietly(engine_options):
    hosts = ("-tp=2", "--nnodes=2", f"--master-port={free_port()}")
    with (
        Process(engine_options, *hosts, "--node-rank=0") as first,
        Process(engine_options, *hosts, "--node-rank=1") as second,
    ):
        first.wait_until_ready()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", second.port), timeout=5)
        first.process.send_signal(signal.SIGTERM)
        assert (first.process.wait(60), second.process.wait(60)) == (0, 0)
        assert "Traceback" not in second.process.stderr.read()


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(engine_options):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with Process(engine_options, f"--port={taken.getsockname()[1]}") as server:
            _, said = server.process.communicate(timeout=60)
    assert server.process.returncode == 2
    assert "cannot listen at 127.0.0.1: Address already in use" in said
    assert "plan:" not in said


def test_flags_that_do_not_go_together_are_refused(engine_options):
    with Process(engine_options, "--tool-call-parser=hermes") as server:
        _, said = server.process.communicate(timeout=60)
    assert server.process.returncode == 2
    assert "enable_auto_tool_choice and tool_call_parser need each other" in said
