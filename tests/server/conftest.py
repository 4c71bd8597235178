"""One real engine for all tests, and real servers in front of it.

An engine belongs to one event loop, so all servers run on one loop in a thread.
"""

import asyncio
import collections
import contextlib
import dataclasses
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import pytest
import uvloop

from jaxllm import LLM, AsyncLLMEngine, SamplingParams
from jaxllm.config import EngineArgs
from jaxllm.frontend.output_collector import OutputCollector
from jaxllm.openai.served_model import ServedModel
from jaxllm.server.auth import Keys
from jaxllm.server.options import ServerOptions
from jaxllm.server.run import Server, bind
from jaxllm.server.service import Service
from jaxllm.testing import make_tiny_checkpoint
from tests.ports import free_port

# What a test waits for at most, on the busiest machine. The first request of a kind may compile.
WAIT_S = 300


@pytest.fixture(scope="session")
def profile_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="session")
def engine_options(tmp_path_factory, profile_dir):
    return {
        "model": str(make_tiny_checkpoint(tmp_path_factory.mktemp("model"))),
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "kv_cache_memory_bytes": 16 << 20,
        "enforce_eager": True,
        "profile_dir": str(profile_dir),
    }


@pytest.fixture(scope="session")
def llm(engine_options):
    llm = LLM(**engine_options)
    # Compile every program here, so that the servers' engines find it in the cache.
    llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
    llm.generate(["a"] * 4, SamplingParams(max_tokens=2), use_tqdm=False)
    return llm


class Host:
    """The engine, the loop and its servers."""

    def __init__(self, engine_options):
        self.engine = AsyncLLMEngine(EngineArgs(**engine_options))
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def call(self, coroutine):
        """Run a coroutine on the servers' loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_S)

    @contextlib.contextmanager
    def serve(self, *, keys=(), admin_keys=(), max_new_tokens=None, **options):
        """Start a server with these options; yield an HTTP client of it."""
        # Other servers of the same engine would log lines that a test takes for its own.
        options = ServerOptions(
            port=0, served_model_name=("tiny", "alias"), disable_log_stats=True, **options
        )
        options.validate()
        served = ServedModel.of(
            self.engine,
            options.served_model_name,
            options.lora_modules,
            options.lora_resolver_dirs,
            options.lora_resolver,
            trust_request_chat_template=options.trust_request_chat_template,
            answer_format=options.answer_format,
        )
        served = dataclasses.replace(served, max_new_tokens=max_new_tokens)
        keys = Keys(api=keys, admin=admin_keys)
        server = Server(Service(self.engine, served, options), keys)
        listener = bind(options)
        future = asyncio.run_coroutine_threadsafe(server.serve([listener]), self._loop)
        while not server.started:
            assert not future.done(), future.result()
            time.sleep(0.01)
        port = listener.getsockname()[1]
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as client:
                client.port, client.server = port, server
                yield client
        finally:
            server.should_exit = True
            future.result(WAIT_S)

    def wait_until_idle(self):
        """Wait until the engine has no requests; return its stats."""
        deadline = time.monotonic() + WAIT_S
        while True:
            stats = self.call(self.engine.stats())
            if not (stats.num_requests_running or stats.num_requests_waiting):
                return stats
            assert time.monotonic() < deadline, stats
            time.sleep(0.05)

    def close(self):
        if self._loop.is_closed():
            return
        self.call(_shut_down(self.engine))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _shut_down(engine):
    engine.shutdown()


@pytest.fixture(scope="session")
def host(engine_options, llm):  # after LLM, which fills the cache of compiled programs
    host = Host(engine_options)
    yield host
    host.close()


@pytest.fixture(scope="session")
def host_with_adapters(engine_options, llm):
    host = Host(engine_options | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8})
    yield host
    host.close()


@pytest.fixture
def make_host(llm):
    """A function that makes separate engines."""
    with contextlib.ExitStack() as stack:

        def make(engine_options):
            host = Host(engine_options)
            stack.callback(host.close)
            return host

        yield make


@pytest.fixture(scope="session")
def new_host():
    return Host


@pytest.fixture(scope="session")
def client(host):
    """A server with default options."""
    with host.serve(access_log=False) as client:
        yield client


class ServeProcess:
    """`jaxllm serve` in its own process, which ends with the context."""

    def __init__(self, engine_options, *flags):
        self.port = free_port()
        options = dict(engine_options)
        command = [sys.executable, "-m", "jaxllm.cli.main", "serve", options.pop("model")]
        command += [f"--port={self.port}", "--served-model-name=tiny", *flags]
        del options["enforce_eager"]
        command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        self._log = tempfile.NamedTemporaryFile()  # a pipe without a reader would fill up
        self.process = subprocess.Popen([*command, "--enforce-eager"], stderr=self._log)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=WAIT_S)

    def wait_until_ready(self):
        """Wait until all frontends serve. /ready is not enough: any frontend may answer it."""
        deadline = time.monotonic() + WAIT_S
        while "serving tiny at" not in self.said():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert self.client.get("/ready").status_code == 200

    def metric(self, name):
        """The sum of a metric's samples, asked on a new connection."""
        page = httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=WAIT_S).text
        return sum(map(float, re.findall(rf"^jaxllm:{name}{{.*}} (\S+)$", page, re.M)))

    def wait_until_idle(self):
        deadline = time.monotonic() + WAIT_S
        while self.metric("num_requests_running") or self.metric("num_requests_waiting"):
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def said(self):
        """The log so far."""
        return Path(self._log.name).read_text()

    @property
    def engine_pid(self):
        (pid,) = self.children("jaxllm.engine.process")
        return pid

    def children(self, module):
        """Process ids of children that run this module."""
        command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(self.process.pid)]
        rows = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        return [int(row.split()[0]) for row in rows if row.endswith(f"-m {module}")]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def runs(pid):
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Serving:
    """Starts server processes."""

    free_port, runs = staticmethod(free_port), staticmethod(runs)

    def __init__(self, engine_options):
        self._engine_options = engine_options

    def __call__(self, *flags):
        return ServeProcess(self._engine_options, *flags)


@pytest.fixture(scope="session")
def serving(engine_options, llm):  # after LLM, which fills the cache of compiled programs
    return Serving(engine_options)


class Asked:
    """One request on its own connection, for tests with many requests."""

    def __init__(self, reader, writer, status):
        self._reader = reader
        self._writer = writer
        self.status = status
        self.port = writer.get_extra_info("sockname")[1]  # of this end

    @classmethod
    async def open(cls, port, body, receive_bytes=None):
        """Send the request and wait for the status."""
        connection = socket.socket()
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 12)
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        try:
            status = await reader.readline()
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        return cls(reader, writer, int(status.split()[1]))

    async def events(self):
        """Yield the data of a stream's events until its end."""
        while line := await self._reader.readline():
            if line.startswith(b"data: "):
                yield line[len("data: ") :].decode().strip()

    async def rest(self):
        """Read the rest of the response, including headers."""
        return (await self._reader.read()).decode()

    def leave(self):
        """Close the connection at once, even with data in flight."""
        self._writer.transport.abort()


@pytest.fixture(scope="session")
def ask():
    return Asked.open


@pytest.fixture
def piece_by_piece(monkeypatch):
    """Clients get each token by itself. A server that is slow sends what has come meanwhile at
    once, which is as good, but shows nothing of how a stream is cut."""
    put, get = OutputCollector.put, OutputCollector.get
    late = collections.defaultdict(collections.deque)

    def put_last(self, output):
        if self._output is None and not late[self]:
            put(self, output)
        else:
            late[self].append(output)

    async def get_first(self):
        output = await get(self)
        if late[self]:
            put(self, late[self].popleft())
        return output

    monkeypatch.setattr(OutputCollector, "put", put_last)
    monkeypatch.setattr(OutputCollector, "get", get_first)
