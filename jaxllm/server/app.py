"""The ASGI application: the endpoints behind the middleware that every request passes."""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxllm.errors import JaxLLMError
from jaxllm.openai.errors import NotFoundError
from jaxllm.openai.pooling.endpoints import POOLING_PATHS
from jaxllm.server.auth import Authentication, Keys
from jaxllm.server.endpoint import Access, Endpoint
from jaxllm.server.endpoints import offered
from jaxllm.server.errors import HTTPError, error_response
from jaxllm.server.hosts import KnownHosts
from jaxllm.server.http_metrics import HTTPMetrics
from jaxllm.server.openapi import make_document
from jaxllm.server.options import ServerOptions
from jaxllm.server.request_id import RequestIds
from jaxllm.server.service import Service

Lifespan = Callable[[Starlette], contextlib.AbstractAsyncContextManager[None]]


def make_app(service: Service, keys: Keys, lifespan: Lifespan) -> Starlette:
    """Make the application of a service. Without keys it is open to everybody."""
    endpoints = offered(service, keys)

    @contextlib.asynccontextmanager
    async def observed(app: Starlette) -> AsyncIterator[None]:
        with service.metrics.watching(service.engine):
            async with lifespan(app):
                yield

    routes = [endpoint.route(service) for endpoint in endpoints]
    return assemble(endpoints, routes, service.options, keys, service.metrics.registry, observed)


def assemble(
    endpoints: Sequence[Endpoint],
    routes: Sequence[Route],
    options: ServerOptions,
    keys: Keys,
    registry: CollectorRegistry,
    lifespan: Lifespan,
) -> Starlette:
    """Make an application of endpoints and what serves each of them."""
    middleware = [
        Middleware(RequestIds),
        Middleware(
            HTTPMetrics,
            routes=routes,
            uncounted={one.path for one in endpoints if not one.is_counted},
            registry=registry,
        ),
        Middleware(
            KnownHosts,
            options=options,
            is_open=not keys.api,
            any_host={one.path for one in endpoints if one.access is Access.ANYBODY},
        ),
    ]
    if options.allowed_origins:
        # Before authentication, because a browser sends the preflight request without a key.
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=options.allowed_origins,
                allow_methods=options.allowed_methods,
                allow_headers=options.allowed_headers,
            )
        )
    middleware.append(Middleware(Authentication, keys=keys, endpoints=endpoints))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        # A handler for Exception alone would log every refusal as a failure.
        exception_handlers={
            HTTPException: _of_starlette,
            JaxLLMError: _of_ours,
            Exception: _of_ours,
        },
        lifespan=lifespan,
    )
    # A redirect would go to whatever host the request names.
    app.router.redirect_slashes = False
    app.state.describe = partial(make_document, endpoints, keys)
    return app


async def _of_starlette(request: Request, error: Exception) -> Response:
    """The path does not exist, or not with this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404 and request.url.path in POOLING_PATHS:
        return error_response(does_not_pool(request.url.path))
    if error.status_code == 404:
        return error_response(NotFoundError(f"there is no {request.url.path!r:.80} here"))
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(sorted(_methods(request)))
    return error_response(HTTPError(error.status_code, "BadRequestError", error.detail, headers))


def does_not_pool(path: str) -> NotFoundError:
    return NotFoundError(
        f"there is no {path!r} here: the engine generates; start one with --runner pooling, or a "
        "model that pools"
    )


def _methods(request: Request) -> set[str]:
    """The methods of a path, which may be those of several routes."""
    return {
        method
        for route in request.app.routes
        if route.path_regex.match(request.url.path)
        for method in route.methods
    }


async def _of_ours(request: Request, error: Exception) -> Response:
    return error_response(error)
