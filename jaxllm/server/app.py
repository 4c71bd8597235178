"""The paths, and the application that they make."""

import contextlib
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import jaxllm
from jaxllm.errors import JaxLLMError
from jaxllm.openai.endpoints import ENDPOINTS
from jaxllm.openai.errors import NotFoundError, UnavailableError
from jaxllm.openai.models import ModelCard, ModelList
from jaxllm.openai.schema import EngineBounds
from jaxllm.server.admin import ADMIN_PATHS, admin_routes
from jaxllm.server.answers import AnswerEndpoint
from jaxllm.server.auth import OPEN_PATHS, Authentication, Keys
from jaxllm.server.engine_metrics import EngineMetrics
from jaxllm.server.errors import HTTPError, error_response, json_response
from jaxllm.server.hosts import KnownHosts
from jaxllm.server.http_metrics import HTTPMetrics
from jaxllm.server.json_endpoint import JSONEndpoint
from jaxllm.server.metrics import ServerMetrics
from jaxllm.server.openapi import make_document
from jaxllm.server.page.routes import page_routes
from jaxllm.server.request_id import RequestIds
from jaxllm.server.service import Service
from jaxllm.server.tokenize import detokenize, tokenize

Lifespan = Callable[[Starlette], contextlib.AbstractAsyncContextManager[None]]


def make_app(service: Service, keys: Keys, lifespan: Lifespan) -> Starlette:
    """The application in front of a service; without keys it is open to everybody."""
    options, engine = service.options, service.engine
    model = service.served.names[0]
    metrics = ServerMetrics(
        options.metrics_prefix,
        model,
        num_replicas=engine.config.parallel.data_parallel_size,
        refused=service.admission.num_refused,
    )
    service.peers.report = metrics.report
    engine_metrics = EngineMetrics(engine, options.metrics_prefix, model)
    if engine.tracer is not None:
        engine.tracer.model = model

    async def health(request: Request) -> Response:
        return Response(status_code=200 if engine.is_running else 503)

    async def ready(request: Request) -> Response:
        return Response(status_code=200 if service.is_ready else 503)

    async def version(request: Request) -> Response:
        return json_response({"version": jaxllm.__version__})

    async def list_models(request: Request) -> Response:
        models = [_model(service, name) for name in service.served.names]
        return json_response(ModelList(data=models))

    async def show_model(request: Request) -> Response:
        name = request.path_params["name"]
        service.served.check_name(name)
        return json_response(_model(service, name))

    async def load(request: Request) -> Response:
        return json_response({"server_load": service.admission.num_answers})

    async def expose_metrics(request: Request) -> Response:
        try:
            reports = await service.peers.ask()
        except OSError:
            # Without all of them counters would seem to have begun anew.
            raise UnavailableError("a frontend does not say what it has counted") from None
        page = metrics.expose(await engine_metrics.read(), reports)
        return Response(page, media_type="text/plain; version=0.0.4")

    async def describe(request: Request) -> Response:
        return json_response(make_document(routes, keys, _bounds(service)))

    routes = [
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/ready", ready),
        Route("/version", version),
        Route("/load", load),
        Route("/metrics", expose_metrics),
        Route("/openapi.json", describe),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", show_model),
        Route("/tokenize", JSONEndpoint(service, tokenize), methods=["POST"]),
        Route("/detokenize", JSONEndpoint(service, detokenize), methods=["POST"]),
    ]
    for path, endpoint in ENDPOINTS.items():
        routes.append(Route(path, AnswerEndpoint(endpoint, service), methods=["POST"]))
    if not options.disable_page:
        routes += page_routes()

    open_paths = OPEN_PATHS
    if keys.admin or options.admin_without_key:
        routes += admin_routes(service, keys.admin)
    if keys.admin:
        open_paths |= ADMIN_PATHS  # they ask for a key themselves

    @contextlib.asynccontextmanager
    async def observed(app: Starlette) -> AsyncIterator[None]:
        with metrics.watching(engine):
            async with lifespan(app):
                yield

    middleware = [
        Middleware(RequestIds),
        Middleware(HTTPMetrics, routes=routes, registry=metrics.registry),
        Middleware(KnownHosts, options=options, is_open=not keys.api),
    ]
    if options.allowed_origins:
        # Outside: a browser asks before it sends a key.
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=options.allowed_origins,
                allow_methods=options.allowed_methods,
                allow_headers=options.allowed_headers,
            )
        )
    if keys.api:
        middleware.append(Middleware(Authentication, keys=keys.api, open_paths=open_paths))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        # With Exception alone every refusal would be a failure in the log.
        exception_handlers={
            HTTPException: _of_starlette,
            JaxLLMError: _of_ours,
            Exception: _of_ours,
        },
        lifespan=observed,
    )
    # To another address it would be a redirect to whatever host the request names.
    app.router.redirect_slashes = False
    return app


def _model(service: Service, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=service.started,
        root=service.engine.info.model,
        max_model_len=service.engine.info.max_model_len,
    )


def _bounds(service: Service) -> EngineBounds:
    """What is described of this engine."""
    info, served = service.engine.info, service.served
    most = service.admission.max_answers
    return EngineBounds(
        vocab_size=info.vocab_size,
        max_logprobs=info.max_logprobs,
        max_model_len=info.max_model_len,
        **({} if most is None else {"max_n": most}),
        takes_empty_text=served.tokenizer is not None and bool(served.tokenizer.encode("")),
        has_priorities=service.engine.config.scheduler.scheduling_policy != "fcfs",
    )


async def _of_starlette(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(NotFoundError(f"there is no {request.url.path!r:.80} here"))
    return error_response(
        HTTPError(error.status_code, "BadRequestError", error.detail, error.headers)
    )


async def _of_ours(request: Request, error: Exception) -> Response:
    return error_response(error)
