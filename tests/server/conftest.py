"""One real engine for all, and as many real servers in front of it as tests want.

An engine belongs to one event loop, so all servers run on one, in a thread.
"""

import asyncio
import contextlib
import dataclasses
import threading
import time

import httpx
import pytest
import uvloop

from jaxllm import LLM, AsyncLLMEngine, SamplingParams
from jaxllm.config import EngineArgs
from jaxllm.openai.served_model import ServedModel
from jaxllm.server.auth import Keys
from jaxllm.server.options import ServerOptions
from jaxllm.server.parsing import NamedParsers
from jaxllm.server.run import Server, bind
from jaxllm.server.service import Service
from jaxllm.testing import make_tiny_checkpoint


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
        "compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
    }


@pytest.fixture(scope="session")
def llm(engine_options):
    llm = LLM(**engine_options)
    # Every program is compiled, and in the cache when engines of servers need it.
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
        """The result of a coroutine on the servers' loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    @contextlib.contextmanager
    def serve(self, *, keys=(), admin_keys=(), max_new_tokens=None, **options):
        """A server with these options, as an HTTP client of it."""
        options = ServerOptions(port=0, served_model_name=("tiny", "alias"), **options)
        options.validate()
        served = ServedModel.of(
            self.engine,
            options.served_model_name,
            trust_request_chat_template=options.trust_request_chat_template,
            parsers=NamedParsers(options.reasoning_parser, options.tool_call_parser),
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
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                client.port = port
                yield client
        finally:
            server.should_exit = True
            future.result(60)

    def wait_until_idle(self):
        """Until the engine has nothing to do; returns its stats."""
        deadline = time.monotonic() + 30
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


@pytest.fixture
def make_host(llm):
    """Engines that are like no other."""
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
    """A server with what is the default."""
    with host.serve(access_log=False) as client:
        yield client
