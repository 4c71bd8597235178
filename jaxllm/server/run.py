"""Runs a server from its options to its end: the engine, the socket, signals, and the shutdown of
both when the server or the engine ends."""

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.applications import Starlette

from jaxllm.config import EngineConfig
from jaxllm.errors import refused
from jaxllm.files import read_given_text
from jaxllm.frontend.async_llm_engine import AsyncLLMEngine
from jaxllm.frontend.engine_process import EngineProcess
from jaxllm.logging import init_logger
from jaxllm.openai.served_model import ServedModel
from jaxllm.server.app import make_app
from jaxllm.server.auth import Keys, read_keys
from jaxllm.server.batch_runner import run_batches
from jaxllm.server.endpoints import ENDPOINTS
from jaxllm.server.frontends import Frontends
from jaxllm.server.hosts import is_loopback
from jaxllm.server.http_protocol import KEEP_IDLE_S, limited_protocol
from jaxllm.server.options import ServerOptions
from jaxllm.server.peers import Peers
from jaxllm.server.service import Service
from jaxllm.server.stats_log import log_stats

logger = init_logger(__name__)

EXIT_ENGINE_DEAD = 1
# The interval of checking the engine, and the time in which clients can see that it has ended.
_LOOK_S = 0.5
_SHOW_DEATH_S = 1.0
# The time for clients to read their answers after the last ones were aborted.
_LAST_WORDS_S = 5.0

_UNCOUNTED = {endpoint.path for endpoint in ENDPOINTS if not endpoint.is_counted}


def run_server(options: ServerOptions, config: EngineConfig) -> int:
    """Serve until a signal or the end of the engine; return the exit status."""
    options.validate()
    keys = read_keys(options)
    template = options.chat_template and read_given_text(options.chat_template)
    with contextlib.ExitStack() as stack:
        signal.signal(signal.SIGTERM, functools.partial(_end_at_once, stack))
        listener = None
        if not config.parallel.may_follow:
            # Report a port in use before the model is loaded. The socket does not listen yet.
            listener = stack.enter_context(bind(options))
        process = EngineProcess(config)
        signal.signal(signal.SIGTERM, functools.partial(_end_unless_following, stack, process))
        stack.callback(process.stop, grace_s=0)
        peers = Peers.first(process.assignment.directory, options.api_server_count)
        frontends = stack.enter_context(Frontends())
        start = functools.partial(frontends.start, process.assignment, options, keys, template)
        if listener is not None:
            start(listener)
        engine = AsyncLLMEngine(config, process)
        stack.callback(engine.shutdown)
        # On a rank that follows, AsyncLLMEngine() has not returned.
        if listener is None:
            listener = stack.enter_context(bind(options))
            start(listener)
        frontends.await_ready(engine)
        if not keys.api and not is_loopback(options.host):
            logger.warning(
                "everybody who reaches %s may use this server; --api-key-file sets keys",
                options.host,
            )
        server = make_server(engine, options, keys, template, peers, frontends)
        server.run([listener])
        return EXIT_ENGINE_DEAD if engine.errored or frontends.has_lost else 0


def make_server(
    engine: AsyncLLMEngine,
    options: ServerOptions,
    keys: Keys,
    chat_template: str | None,
    peers: Peers | None = None,
    frontends: Frontends | None = None,
) -> "Server":
    """Make a server in front of an engine, with its peers and the frontends that it owns."""
    return Server(make_service(engine, options, chat_template, peers), keys, frontends)


def make_service(
    engine: AsyncLLMEngine,
    options: ServerOptions,
    chat_template: str | None,
    peers: Peers | None = None,
) -> Service:
    """Make what the endpoints of a server share."""
    served = ServedModel.of(
        engine,
        options.served_model_name,
        options.lora_modules,
        options.lora_resolver_dirs,
        options.lora_resolver,
        chat_template=chat_template,
        trust_request_chat_template=options.trust_request_chat_template,
        answer_format=options.answer_format,
    )
    service = Service(engine, served, options, peers)
    service.templates.start()
    return service


class Server(uvicorn.Server):
    """uvicorn, with an engine behind it."""

    def __init__(self, service: Service, keys: Keys, frontends: Frontends | None = None):
        self._service = service
        self._frontends = frontends or Frontends()
        self._is_first = service.peers.index == 0
        options = service.options
        _log_like_us(options.access_log)
        super().__init__(
            uvicorn.Config(
                make_app(service, keys, self._lifespan),
                http=limited_protocol(options.max_header_bytes, options.client_timeout),
                loop="uvloop",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=options.access_log,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_IDLE_S,
                timeout_graceful_shutdown=int(options.shutdown_timeout + _LAST_WORDS_S) + 1,
                ssl_certfile=options.ssl_certfile,
                ssl_keyfile=options.ssl_keyfile,
                ssl_ca_certs=options.ssl_ca_certs,
                ssl_cert_reqs=ssl.CERT_REQUIRED if options.ssl_ca_certs else ssl.CERT_NONE,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End the server in order on SIGTERM or Ctrl-C; at once on the second one."""
        if not self._is_first:
            yield  # the first frontend gets the signals and sends an order
            return
        try:
            loop = asyncio.get_running_loop()
            for one in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(one, self._on_signal)
        except (RuntimeError, ValueError):
            pass  # not in the main thread, where no signals come
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # Loaded objects stay. A garbage collection that scans all of them would delay every
        # stream by 0.2 s, again and again.
        gc.collect()
        gc.freeze()
        if not self._is_first:
            return
        scheme = "https" if self.config.is_ssl else "http"
        names = ", ".join(self._service.served.names)
        for one in sockets or ():
            host, port = one.getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            logger.info("serving %s at %s://%s:%d", names, scheme, host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more requests. Let those under way finish, or abort them after a time limit."""
        self._service.is_stopping = True
        self._frontends.stop(self._service.options.shutdown_timeout + 2 * _LAST_WORDS_S)
        logger.info("stopping; %d requests are under way", len(self._service.under_way))
        limit = asyncio.create_task(self._abort_late())
        await super().shutdown(sockets)
        limit.cancel()
        while self._frontends.are_stopping and not self.force_exit:
            await asyncio.sleep(_LOOK_S / 5)

    def _on_signal(self) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def _abort_late(self) -> None:
        await asyncio.sleep(self._service.options.shutdown_timeout)
        while True:
            await self._service.abort_all()
            await asyncio.sleep(_LOOK_S)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        service = self._service
        await service.engine.stats()  # from here on the engine's messages are read
        listener = await service.peers.listen()
        tasks = [
            asyncio.create_task(self._stop_without_engine()),
            asyncio.create_task(self._stop_without_frontends()),
        ]
        if self._is_first and not service.options.disable_log_stats:
            tasks.append(asyncio.create_task(log_stats(service.engine)))
        if self._is_first and service.responses is not None:
            await asyncio.to_thread(service.responses.end_lost)
        if self._is_first and service.batches is not None:
            tasks.append(asyncio.create_task(run_batches(service, service.batches)))
        yield
        if listener is not None:
            listener.close()
        await service.close(*tasks)

    async def _stop_without_engine(self) -> None:
        while self._service.engine.is_running:
            await asyncio.sleep(_LOOK_S)
        self._frontends.engine_has_ended(self._service.engine.exit_status or EXIT_ENGINE_DEAD)
        logger.error("the engine has ended, and so does the server")
        await asyncio.sleep(_SHOW_DEATH_S)
        self.should_exit = True

    async def _stop_without_frontends(self) -> None:
        while (lost := self._frontends.lost()) is None:
            await asyncio.sleep(_LOOK_S)
        logger.error(
            "frontend %d has ended with status %s, and so does the server", lost.index, lost.status
        )
        self.should_exit = True


def bind(options: ServerOptions) -> socket.socket:
    """Bind the address. Nobody can connect before the server listens."""
    try:
        ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise refused("host", options.host, f"{error.strerror}; give an address") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise refused(
            "port",
            options.port,
            f"cannot listen at {options.host}: {error.strerror}; give another --host or --port",
        ) from error
    return listener


def _end_unless_following(
    stack: contextlib.ExitStack, process: EngineProcess, signum: int, frame: object
) -> None:
    """Leave the end of a rank that follows to rank 0, which gets the signal, too, when all ranks
    are to end, and needs this one for its last requests."""
    if process.follows:
        logger.info("rank 0 says when this one ends")
    else:
        _end_at_once(stack, signum, frame)


def _end_at_once(stack: contextlib.ExitStack, signum: int, frame: object) -> None:
    """End the processes. Before the server runs there are no requests to finish.

    An exception would not do: modules that are being imported may catch it, and some C modules exit
    silently.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stack.close()
    sys.stderr.flush()
    os._exit(128 + signum)


def _log_like_us(access_log: bool) -> None:
    ours = logging.getLogger("jaxllm")
    for name in ("uvicorn.error", "uvicorn.access"):
        theirs = logging.getLogger(name)
        theirs.handlers = list(ours.handlers)
        theirs.propagate = False
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    access = logging.getLogger("uvicorn.access")
    access.setLevel(logging.INFO if access_log else logging.WARNING)
    access.addFilter(_is_of_interest)  # adding the same filter again has no effect


def _is_of_interest(record: logging.LogRecord) -> bool:
    """Keep successful probes of the server's status out of the access log."""
    match record.args:
        case (_, _, str(target), _, int(status)):
            return target.partition("?")[0] not in _UNCOUNTED or status >= 400
        case _:
            return True
