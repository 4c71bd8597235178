"""The server of several fleets, one for each model, as the ingress of their application.

There is one server: keys, hosts, counts and endpoints are those of a server of one model. The field
`model` of a request says which fleet answers it, by the endpoint that this fleet would have alone.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_type_hints

import msgspec
from prometheus_client import CollectorRegistry
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.errors import ValidationError
from jaxllm.logging import init_logger
from jaxllm.openai.adapter_resolver import AdapterResolver
from jaxllm.openai.errors import NotFoundError, UnavailableError
from jaxllm.openai.models import ModelList
from jaxllm.openai.schema import ANY_ENGINE
from jaxllm.server import status
from jaxllm.server.app import assemble, does_not_pool
from jaxllm.server.auth import Keys, read_keys
from jaxllm.server.body import BodyLimits, read_body
from jaxllm.server.disconnect import while_connected
from jaxllm.server.endpoint import Endpoint
from jaxllm.server.endpoints import for_users, offered
from jaxllm.server.errors import Disconnected, error_response, json_response, respond
from jaxllm.server.limits import Admission
from jaxllm.server.metrics import Refusals, page
from jaxllm.server.openapi import bounds_of, widest
from jaxllm.server.peers import Peers
from jaxllm.server.ray.frontend import log_stats_of, service_of, within_prefix
from jaxllm.server.ray.models import AskedModel, read_models
from jaxllm.server.service import Service

logger = init_logger(__name__)

# A frontend serves when all models can be served, or so long after the first one can.
_PATIENCE_S = 60.0
_AGAIN_S = 5.0
# The name of the model in figures of all models together.
_ALL = ""
# The event loop looks for the name in a body up to this size, because a thread would cost more.
_SMALL_BODY = 256 << 10


class Ingress:
    """Waits for the first replicas, which say what they serve, and then makes the application."""

    def __init__(self, engines: Sequence[Any], options: Mapping[str, Any]):
        """`engines` has the handle of each model's deployment."""
        asked = read_models(options)
        keys = read_keys(asked.server)
        has_own_seed = asked.fleet.num_frontends > 1
        hosted = [
            HostedModel(model, partial(service_of, handle, model.asked, has_own_seed), keys)
            for model, handle in zip(asked.models, engines, strict=True)
        ]
        self._models = Models(hosted, asked.server, keys)

    async def check_health(self) -> None:
        """Raise if a model gets no answers any more, so that Serve replaces the frontend."""
        await self._models.check_health()

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        await self._models.start()
        return within_prefix(self._models.app())


class HostedModel:
    """A model, which may not be there yet."""

    def __init__(self, asked: AskedModel, make: Callable[[], Awaitable[Service]], keys: Keys):
        self.names = asked.names
        self.service: Service | None = None
        # It finds adapters of a model that cannot be served yet, too.
        self.resolver = AdapterResolver(asked.asked.server.lora_resolver_dirs)
        self._asks_user = asked.asked.server.lora_resolver is not None
        self._make, self._keys = make, keys
        self._routes: dict[tuple[str, tuple[str, ...]], Route] = {}
        self._log: asyncio.Task[None] | None = None
        self._stack = contextlib.ExitStack()

    async def start(self) -> None:
        """Wait until a replica says what it serves."""
        while self.service is None:
            try:
                service = await self._make()
            except (RayError, RayServeException) as error:
                logger.warning("%s cannot be served yet: %s", self.names[0], error)
                await asyncio.sleep(_AGAIN_S)
                continue
            endpoints = offered(service, self._keys)
            self._routes = {(one.path, one.methods): one.route(service) for one in endpoints}
            self._stack.enter_context(service.metrics.watching(service.engine))
            if not service.options.disable_log_stats:
                self._log = asyncio.create_task(log_stats_of(service, self.names[0]))
            self.service = service

    def has_adapter(self, name: str) -> bool:
        if self.service is None:
            return self.resolver.resolve(name) is not None
        return self.service.served.adapters.find(name) is not None

    async def finds_adapter(self, name: str) -> bool:
        """Whether the user's resolver of this model, if it has one, finds an adapter."""
        if not self._asks_user:
            return False
        if self.service is None:
            raise UnavailableError(f"{self.names[0]!r} cannot be served yet; try again later")
        timeout = self.service.options.request_timeout
        return await self.service.served.adapters.ask(name, timeout)

    def has(self, endpoint: Endpoint) -> bool:
        return (endpoint.path, endpoint.methods) in self._routes

    def app(self, endpoint: Endpoint) -> ASGIApp:
        """What serves an endpoint."""
        if self.service is None:
            raise UnavailableError(f"{self.names[0]!r} cannot be served yet; try again later")
        route = self._routes.get((endpoint.path, endpoint.methods))
        if route is None:  # the only endpoints that not every model has
            raise does_not_pool(endpoint.path)
        return route.app

    async def close(self) -> None:
        if self.service is None:
            return
        self._stack.close()
        self.service.is_stopping = True
        await self.service.close(*([] if self._log is None else [self._log]))
        self.service.engine.shutdown()


class Models:
    """All models, and the application that finds the one of a request."""

    def __init__(self, models: Sequence[HostedModel], options: Any, keys: Keys):
        self._models, self._options, self._keys = models, options, keys
        self._by_name = {name: one for one in models for name in one.names}
        self._starting: list[asyncio.Task[None]] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self.admission = Admission(None, None, options.max_queued_bytes, Peers.none())
        refused = self.admission.num_refused
        self._registry.register(Refusals(options.metrics_prefix, _ALL, refused))
        self.client_timeout = options.client_timeout

    async def start(self) -> None:
        """Wait until models can be served."""
        self._starting = [asyncio.create_task(one.start()) for one in self._models]
        done, pending = await asyncio.wait(self._starting, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            more, pending = await asyncio.wait(pending, timeout=_PATIENCE_S)
            done |= more
        for one in done:
            one.result()  # raises if there is something wrong that waiting does not mend
        for one in pending:
            one.add_done_callback(_report)

    async def check_health(self) -> None:
        """Raise the error of a model that another frontend may be able to serve. Another one would
        refuse an invalid option again, and then serve no model at all."""
        for one in self._starting:
            error = one.exception() if one.done() and not one.cancelled() else None
            if error is not None and not isinstance(error, ValidationError):
                raise error
        for one in self._services():
            await one.engine.check_health()

    def app(self) -> Starlette:
        endpoints = for_users(self._options, pools=True)
        routes = [Route(one.path, self._serve(one), methods=one.methods) for one in endpoints]
        return assemble(
            endpoints, routes, self._options, self._keys, self._registry, self._lifespan
        )

    @property
    def body_limits(self) -> BodyLimits:
        """The widest; the endpoint of a model has its own."""
        return max(one.body_limits for one in self._services())

    async def found(self, name: str | None) -> HostedModel:
        """The model that a request means, also by an adapter that the user's resolver of one model
        finds; raise NotFoundError."""
        try:
            return self.named(name)
        except NotFoundError:
            assert name is not None
            asking = (one.finds_adapter(name) for one in self._models)
            found = await asyncio.gather(*asking, return_exceptions=True)
            if True not in found:
                for error in found:
                    if isinstance(error, BaseException):  # that model may have it
                        raise error from None
                raise
        return self.named(name)

    def named(self, name: str | None) -> HostedModel:
        """The model that a request means; raise NotFoundError."""
        names = ", ".join(map(repr, self._by_name))
        if name is None:
            raise ValidationError(
                f"model is missing: several are served here; name one of {names}",
                parameter="model",
            )
        found = self._by_name.get(name) or self._resolved(name)
        if found is None:
            raise NotFoundError(
                f"model={name!r:.80} is not served here; the names are {names}",
                parameter="model",
                value=name,
            )
        return found

    def first(self, endpoint: Endpoint) -> HostedModel:
        """Any model with this endpoint, for what is the same with all."""
        ready = [one for one in self._models if one.service is not None]
        if not ready:
            raise UnavailableError("no model can be served yet; try again later")
        return next((one for one in ready if one.has(endpoint)), ready[0])

    def _resolved(self, name: str) -> HostedModel | None:
        found = [one for one in self._models if one.has_adapter(name)]
        if len(found) > 1:
            raise ValidationError(
                f"model={name!r:.80} is an adapter of several models ("
                f"{', '.join(repr(one.names[0]) for one in found)}); give each a name of its own",
                parameter="model",
                value=name,
            )
        return found[0] if found else None

    def _services(self) -> list[Service]:
        return [one.service for one in self._models if one.service is not None]

    def _serve(self, endpoint: Endpoint) -> Any:
        if any("model" in get_type_hints(body) for body in endpoint.body):
            return _ByModel(endpoint, self)
        own = {
            "/health": self._health,
            "/ping": self._health,
            "/ready": self._ready,
            "/load": self._load,
            "/metrics": self._metrics,
            "/openapi.json": self._describe,
            "/v1/models": self._list,
            "/v1/models/{name:path}": self._show,
        }
        return own.get(endpoint.path) or _OfAny(endpoint, self)

    async def _health(self, request: Request) -> Response:
        is_running = all(one.engine.is_running for one in self._services())
        return Response(status_code=200 if is_running else 503)

    async def _ready(self, request: Request) -> Response:
        services = self._services()
        is_ready = len(services) == len(self._models) and all(one.is_ready for one in services)
        return Response(status_code=200 if is_ready else 503)

    async def _load(self, request: Request) -> Response:
        return json_response(
            {"server_load": sum(one.admission.num_answers for one in self._services())}
        )

    async def _metrics(self, request: Request) -> Response:
        services = self._services()
        read = await asyncio.gather(*(one.engine_metrics.read() for one in services))
        families = [family for some in read for family in some]
        for one in services:
            families += one.metrics.registry.collect()
        families += self._registry.collect()
        return Response(page(families), media_type="text/plain; version=0.0.4")

    async def _describe(self, request: Request) -> Response:
        """Tell the widest bounds: a request that one of the models takes keeps to them. A model
        that is not there yet may have any."""
        services = self._services()
        are_all = len(services) == len(self._models)
        bounds = widest([bounds_of(one) for one in services]) if are_all else ANY_ENGINE
        return json_response(request.app.state.describe(bounds))

    async def _list(self, request: Request) -> Response:
        cards = [card for one in self._services() for card in status.model_cards(one)]
        return json_response(ModelList(data=cards))

    async def _show(self, request: Request) -> Response:
        service = (await self.found(request.path_params["name"])).service
        if service is None:
            raise UnavailableError("this model cannot be served yet; try again later")
        return await status.show_model(service, request)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        closed = await asyncio.gather(
            *(one.close() for one in self._models), return_exceptions=True
        )
        for error in closed:
            if error is not None:
                logger.error("a model was not closed", exc_info=error)


class _ByModel:
    """An endpoint whose body names a model."""

    def __init__(self, endpoint: Endpoint, models: Models):
        self._endpoint, self._models = endpoint, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        models = self._models
        with models.admission.body() as admit:
            try:
                app, again = await self._find(scope, receive, admit)
            except Disconnected:
                return
            except Exception as error:
                response = error_response(error, self._endpoint.wire)
                await respond(response, scope, receive, send, models.client_timeout)
                return
            await app(scope, again, send)

    async def _find(
        self, scope: Scope, receive: Receive, admit: Callable[[int], None]
    ) -> tuple[ASGIApp, Receive]:
        """Find what serves a request, for which its body is read. The caller keeps no body, since
        an answer may take minutes."""
        body = await read_body(scope, receive, self._models.body_limits, admit)
        model = await while_connected(receive, self._model(body))
        return model.app(self._endpoint), _again(body, receive)

    async def _model(self, body: bytes) -> HostedModel:
        try:
            if len(body) <= _SMALL_BODY:
                named = _NAMED.decode(body)
            else:
                named = await asyncio.to_thread(_NAMED.decode, body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # It refuses this body in the words of the protocol.
            return self._models.first(self._endpoint)
        return await self._models.found(named.model)


class _OfAny:
    """An endpoint that does the same with all models."""

    def __init__(self, endpoint: Endpoint, models: Models):
        self._endpoint, self._models = endpoint, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._models.first(self._endpoint).app(self._endpoint)(scope, receive, send)


class _Named(msgspec.Struct):
    model: str | None = None


_NAMED = msgspec.json.Decoder(_Named)


def _again(body: bytes, receive: Receive) -> Receive:
    """A request whose body has been read, and is handed out once."""
    parts = [body]

    async def received() -> Message:
        if not parts:
            return await receive()
        return {"type": "http.request", "body": parts.pop(), "more_body": False}

    return received


def _report(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a model cannot be served", exc_info=error)
