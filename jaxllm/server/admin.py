"""What an operator asks of a running server: sleep, profiles, the prefix cache, how it was started.
Names and paths are vLLM's. Whoever may ask has an admin key, which is another than those of users.
"""

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import jaxllm
from jaxllm.errors import ValidationError, refused
from jaxllm.server.auth import Authentication
from jaxllm.server.errors import HTTPError, error_response, json_response
from jaxllm.server.service import Service

Handler = Callable[[Request], Awaitable[Response]]

# Options that show what nobody else may know.
_SECRETS = ("api_key", "admin_api_key")


def admin_routes(service: Service, keys: Sequence[str]) -> list[Route]:
    """The endpoints; without keys they are open to all that the server lets in."""
    engine = service.engine

    async def sleep(request: Request) -> Response:
        level = _one(request, "level", "1")
        if not level.isdecimal() or len(level) > 3:
            raise refused("level", level, "it must be an integer")
        await engine.sleep(int(level), _one(request, "mode", "keep"))
        return Response()

    async def wake_up(request: Request) -> Response:
        await engine.wake_up(request.query_params.getlist("tags") or None)
        return Response()

    async def is_sleeping(request: Request) -> Response:
        return json_response({"is_sleeping": await engine.is_sleeping()})

    async def reset_prefix_cache(request: Request) -> Response:
        if not await engine.reset_prefix_cache():
            raise HTTPError(409, "ConflictError", "running requests use it; try again later")
        return Response()

    async def server_info(request: Request) -> Response:
        return json_response(describe(service))

    async def start_profile(request: Request) -> Response:
        await engine.start_profile()
        return Response()

    async def stop_profile(request: Request) -> Response:
        await engine.stop_profile()
        return Response()

    middleware = [Middleware(Authentication, keys=keys, open_paths=())] if keys else []

    def route(path: str, handler: Handler, *names: str, method: str = "POST") -> Route:
        endpoint = _answering(handler, names)
        return Route(path, endpoint, methods=[method], middleware=middleware)

    routes = [
        route("/sleep", sleep, "level", "mode"),
        route("/wake_up", wake_up, "tags"),
        route("/is_sleeping", is_sleeping, method="GET"),
        route("/reset_prefix_cache", reset_prefix_cache),
        route("/server_info", server_info, method="GET"),
    ]
    if engine.config.profiler.profile_dir is not None:
        routes.append(route("/start_profile", start_profile))
        routes.append(route("/stop_profile", stop_profile))
    return routes


ADMIN_PATHS = frozenset(
    {
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/reset_prefix_cache",
        "/server_info",
        "/start_profile",
        "/stop_profile",
    }
)


def describe(service: Service) -> dict[str, Any]:
    """How the server was started, and with what engine; keys are not shown."""
    return {
        "version": jaxllm.__version__,
        "server": {
            field.name: getattr(service.options, field.name)
            for field in dataclasses.fields(service.options)
            if field.name not in _SECRETS
        },
        "engine": _as_json(dataclasses.asdict(service.engine.config)),
        "info": service.engine.info,
    }


def _as_json(value: Any) -> Any:
    """Plain data; of anything else, such as a class, its name."""
    if isinstance(value, dict):
        return {str(name): _as_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    return value if isinstance(value, str | int | float | None) else repr(value)


def _answering(handler: Handler, names: Sequence[str]) -> Handler:
    """The handler, for requests with parameters of these names; errors become answers."""

    @functools.wraps(handler)
    async def answer(request: Request) -> Response:
        try:
            for name in request.query_params:
                if name not in names:
                    known = f"use {', '.join(names)}" if names else "there are none"
                    raise ValidationError(f"unknown parameter {name!r:.80}; {known}")
            return await handler(request)
        except Exception as error:
            return error_response(error)

    return answer


def _one(request: Request, name: str, default: str) -> str:
    values = request.query_params.getlist(name)
    if len(values) > 1:
        raise refused(name, values, "give it once")
    return values[0] if values else default
