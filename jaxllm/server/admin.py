"""Endpoints for operators: sleep, profiles, the prefix cache, the server's configuration. Names and
paths are vLLM's. By default they need an admin key, which differs from users' keys.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import jaxllm
from jaxllm.errors import ValidationError, refused
from jaxllm.openai.fields import read_fields
from jaxllm.server.body import decode_json, read_body
from jaxllm.server.endpoint import Handler
from jaxllm.server.errors import Disconnected, HTTPError, json_response
from jaxllm.server.service import Service

# Options with secret values.
_SECRETS = ("api_key", "admin_api_key")


async def sleep(service: Service, request: Request) -> Response:
    level = _one(request, "level", "1")
    if not level.isdecimal() or len(level) > 3:
        raise refused("level", level, "it must be an integer")
    await service.engine.sleep(int(level), _one(request, "mode", "keep"))
    return Response()


async def wake_up(service: Service, request: Request) -> Response:
    await service.engine.wake_up(request.query_params.getlist("tags") or None)
    return Response()


async def is_sleeping(service: Service, request: Request) -> Response:
    return json_response({"is_sleeping": await service.engine.is_sleeping()})


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    if not await service.engine.reset_prefix_cache():
        raise HTTPError(409, "ConflictError", "running requests use it; try again later")
    return Response()


class AbortRequests(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Ids as a client knows them: in the X-Request-Id of an answer, or in its body."""

    request_ids: list[str] | None = None  # None: all


async def abort_requests(service: Service, request: Request) -> Response:
    with service.admission.body() as admit:
        try:
            body = await read_body(request.scope, request.receive, service.body_limits, admit)
        except Disconnected:
            return Response(status_code=400)  # for nobody
        asked = read_fields(decode_json(body, service.options.max_json_depth), AbortRequests)
    return json_response({"num_aborted": await service.abort(asked.request_ids)})


async def server_info(service: Service, request: Request) -> Response:
    return json_response(describe(service))


async def start_profile(service: Service, request: Request) -> Response:
    await service.engine.start_profile()
    return Response()


async def stop_profile(service: Service, request: Request) -> Response:
    await service.engine.stop_profile()
    return Response()


def with_known_parameters(handler: Handler, names: Collection[str]) -> Handler:
    """The handler, restricted to query parameters of these names."""

    async def answer(service: Service, request: Request) -> Response:
        for name in request.query_params:
            if name not in names:
                known = f"use {', '.join(names)}" if names else "there are none"
                raise ValidationError(f"unknown parameter {name!r:.80}; {known}")
        return await handler(service, request)

    return answer


def describe(service: Service) -> dict[str, Any]:
    """The configuration of the server and the engine, without the keys."""
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
    """Convert to plain data; other values, such as a class, become their repr."""
    if isinstance(value, dict):
        return {str(name): _as_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    return value if isinstance(value, str | int | float | None) else repr(value)


def _one(request: Request, name: str, default: str) -> str:
    values = request.query_params.getlist(name)
    if len(values) > 1:
        raise refused(name, values, "give it once")
    return values[0] if values else default
