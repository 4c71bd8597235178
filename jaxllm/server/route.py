"""`jaxllm route`: one address in front of engines that compute prompts and engines that answer.

A request for a completion goes to an engine that computes its prompt, and then, with what that one
says of the blocks, to an engine that answers. Everything else goes to one that answers. If an
engine that computes prompts fails, the other one does all of the work: a client sees no difference.

Keys pass through: the engines check them. The router understands of a request what it changes.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import prometheus_client
import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxllm.async_http import BrokenConnectionError, HTTPClient, NotConnectedError
from jaxllm.handover.params import NAME
from jaxllm.logging import init_logger
from jaxllm.openai.errors import UnavailableError
from jaxllm.server.disconnect import while_connected
from jaxllm.server.errors import Disconnected, HTTPError, error_response
from jaxllm.server.hosts import KnownHosts
from jaxllm.server.http_protocol import KEEP_IDLE_S, limited_protocol
from jaxllm.server.route_options import RouteOptions

logger = init_logger(__name__)

_TWO_STEPS = ("/v1/chat/completions", "/v1/completions")
# An engine that could not be reached gets no request for so long, unless all others are so too.
_AWAY_S = 5.0
_CONNECT_S = 5.0
# Of a client's headers, what the engines need.
_PASSED_ON = ("authorization", "x-api-key", "x-request-id", "traceparent", "tracestate")
_MAX_HEADER_BYTES, _CLIENT_TIMEOUT_S = 64 << 10, 60.0
# Of a request, what says how its answer is made, beyond what one token needs.
_OF_THE_ANSWER = (
    "stream", "stream_options", "n", "best_of", "min_tokens", "logprobs", "top_logprobs",
    "max_completion_tokens",
)  # fmt: skip
# Where these are given, prompts are not taken over: every token of them is asked about.
_ASKS_ABOUT_PROMPT = ("prompt_logprobs", "echo", "use_beam_search")


@dataclass(eq=False, slots=True)
class Backend:
    """An engine's server."""

    url: str
    client: HTTPClient
    num_open: int = 0
    away_until: float = 0.0

    @contextlib.contextmanager
    def counted(self):
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


@dataclass(slots=True)
class _Answer:
    """What an engine has answered."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)


class Figures:
    """What /metrics shows."""

    def __init__(self, backends: Mapping[str, Sequence[Backend]]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "jaxllm_route_requests", "Requests.", ["way"], registry=self.registry
        )
        self.prefill_seconds = Histogram(
            "jaxllm_route_prefill_seconds",
            "Seconds that prompts took at engines that compute them.",
            registry=self.registry,
        )
        is_open = Gauge(
            "jaxllm_route_open_requests",
            "Requests at an engine now.",
            ["role", "url"],
            registry=self.registry,
        )
        for role, its in backends.items():
            for one in its:
                is_open.labels(role, one.url).set_function(lambda one=one: one.num_open)
        for way in ("handed_over", "computed_alone", "passed_on"):
            self.requests.labels(way)


class Router:
    """Sends each request where it belongs."""

    def __init__(self, options: RouteOptions) -> None:
        self._options = options
        self._prefill, self._decode = (
            [
                Backend(url, HTTPClient(url, {}, once=True, connect_timeout=_CONNECT_S))
                for url in urls
            ]
            for urls in (options.prefill, options.decode)
        )
        self.figures = Figures({"prefill": self._prefill, "decode": self._decode})

    async def completion(self, request: Request) -> Response:
        """A request whose prompt one engine computes, and another one answers."""
        body = await self._body(request)
        headers = _passed_on(request)
        given = _parsed(body)
        if given is None or any(given.get(name) for name in (NAME, *_ASKS_ABOUT_PROMPT)):
            return await self._answered(request, body, headers, "passed_on")
        began = time.monotonic()
        work = self._computed(request.url.path, given, headers)
        answer = await while_connected(request.receive, work)
        if answer is not None and answer.status == 200:
            self.figures.prefill_seconds.observe(time.monotonic() - began)
            transfer = (_parsed(bytes(answer.body)) or {}).get(NAME)
            if transfer:
                body = json.dumps({**given, NAME: transfer}).encode()
                return await self._answered(request, body, headers, "handed_over")
        elif answer is not None and 400 <= answer.status < 500 and answer.status != 429:
            return _response(answer)  # the other engine would say the same
        return await self._answered(request, body, headers, "computed_alone")

    async def other(self, request: Request) -> Response:
        """A request that one engine answers."""
        return await self._answered(
            request, await self._body(request), _passed_on(request), "passed_on"
        )

    async def metrics(self, request: Request) -> Response:
        return Response(
            prometheus_client.generate_latest(self.figures.registry),
            media_type="text/plain; version=0.0.4",
        )

    async def _computed(
        self, path: str, given: dict[str, Any], headers: Mapping[str, str]
    ) -> _Answer | None:
        """Let an engine compute the prompt; None: it cannot be reached, or takes too long."""
        mine = {name: value for name, value in given.items() if name not in _OF_THE_ANSWER}
        mine |= {"max_tokens": 1, NAME: {"do_remote_decode": True, "do_remote_prefill": False}}
        body = json.dumps(mine).encode()
        for backend in sorted(self._prefill, key=_order):
            try:
                async with asyncio.timeout(self._options.prefill_timeout):
                    return await self._answer(backend, path, body, headers)
            except NotConnectedError as error:
                self._note_away(backend, error)
            except (OSError, TimeoutError, BrokenConnectionError) as error:
                self._note_away(backend, error)
                break  # it may have worked on it: one that answers goes on
        return None

    async def _answer(
        self, backend: Backend, path: str, body: bytes, headers: Mapping[str, str]
    ) -> _Answer:
        answer = _Answer()
        with backend.counted():
            answer.status = await backend.client.request(
                "POST", path, body, headers, lambda _, data: answer.body.extend(data)
            )
        if answer.status >= 500:
            what = "%s answers %d; its prompt is computed elsewhere"
            logger.warning(what, backend.url, answer.status)
        return answer

    async def _answered(
        self, request: Request, body: bytes, headers: Mapping[str, str], way: str
    ) -> Response:
        """Pass a request to an engine that answers, and its answer on as it comes. Another one is
        asked only if there was no connection: a request is never begun twice."""
        self.figures.requests.labels(way).inc()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        for backend in sorted(self._decode, key=_order):
            answer = _Passing(backend, request.method, path, body, headers)
            try:
                await while_connected(request.receive, answer.begin())
            except NotConnectedError as error:
                self._note_away(backend, error)
                continue
            except (OSError, BrokenConnectionError) as error:
                self._note_away(backend, error)
                return error_response(HTTPError(502, "BadGatewayError", "the engine has failed"))
            return _PassedOn(answer)
        return error_response(UnavailableError("no engine can be reached; try again later"))

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._options.max_body_bytes:
                most = self._options.max_body_bytes
                raise HTTPError(413, "BadRequestError", f"the body is longer than {most} bytes")
        return bytes(body)

    def _note_away(self, backend: Backend, error: Exception) -> None:
        backend.away_until = time.monotonic() + _AWAY_S
        logger.warning("%s cannot be reached: %s", backend.url, error or type(error).__name__)


class _Passing:
    """An answer that is passed on."""

    def __init__(
        self, backend: Backend, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> None:
        self._backend = backend
        self._request = (method, path, body, headers)
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._has_begun = asyncio.Event()
        self.status = 0
        self.headers: dict[str, str] = {}
        self._task = asyncio.create_task(self._run())

    async def begin(self) -> None:
        """Wait for the head of the answer; raise what happened before it."""
        waiting = asyncio.create_task(self._has_begun.wait())
        try:
            await asyncio.wait((waiting, self._task), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        finally:
            waiting.cancel()
        if not self.status:
            await self._task

    async def pieces(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            yield piece
        await self._task  # raises if the answer has no end

    def end(self) -> None:
        """Let the engine end the answer, too, if it is still at it."""
        self._task.cancel()

    async def _run(self) -> None:
        try:
            with self._backend.counted():
                await self._backend.client.request(
                    *self._request, lambda _, data: self._pieces.put_nowait(data), self._on_head
                )
        finally:
            self._pieces.put_nowait(None)

    def _on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status
        for name in (b"content-type", b"retry-after", b"x-request-id", b"cache-control"):
            if name in headers:
                self.headers[name.decode()] = headers[name].decode("latin-1")
        self._has_begun.set()


class _PassedOn(StreamingResponse):
    """The response of such an answer. It may end before its first piece, when the client leaves."""

    def __init__(self, answer: _Passing) -> None:
        super().__init__(answer.pieces(), answer.status, answer.headers)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.end()


def make_router(options: RouteOptions) -> Starlette:
    """Make the application."""
    router = Router(options)
    methods = ["GET", "POST", "DELETE"]

    async def of_ours(request: Request, error: Exception) -> Response:
        return error_response(error)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    return Starlette(
        middleware=[Middleware(KnownHosts, options=options, is_open=True, any_host=())],
        routes=[
            *(Route(path, router.completion, methods=["POST"]) for path in _TWO_STEPS),
            Route("/metrics", router.metrics),
            Route("/{path:path}", router.other, methods=methods),
        ],
        exception_handlers={HTTPError: of_ours, Disconnected: gone},
    )


def run_router(options: RouteOptions) -> None:
    """Route until a signal."""
    logger.info("routing at http://%s:%d", options.host, options.port)
    uvicorn.run(
        make_router(options),
        host=options.host,
        port=options.port,
        http=limited_protocol(_MAX_HEADER_BYTES, _CLIENT_TIMEOUT_S),
        loop="uvloop",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_IDLE_S,
    )


def _order(backend: Backend) -> tuple[bool, int]:
    return backend.away_until > time.monotonic(), backend.num_open


def _passed_on(request: Request) -> dict[str, str]:
    its = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
    if "content-type" in request.headers:
        its["content-type"] = request.headers["content-type"]
    return its


def _parsed(body: bytes) -> dict[str, Any] | None:
    """A JSON object; None: it is something else, which an engine refuses better than we do."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return given if isinstance(given, dict) else None


def _response(answer: _Answer) -> Response:
    return Response(bytes(answer.body), answer.status, media_type="application/json")
