"""Stored responses: read again, and deleted."""

from functools import partial
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.errors import refused
from jaxllm.openai.errors import NotFoundError
from jaxllm.openai.responses.endpoint import responses_endpoint
from jaxllm.openai.responses.store import ResponseStore
from jaxllm.server.answers import AnswerEndpoint
from jaxllm.server.errors import json_response
from jaxllm.server.service import Service


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    deleted: bool = True


class InputItems(msgspec.Struct, kw_only=True):
    """The items that a response was made of."""

    object: str = "list"
    data: list[Any]
    has_more: bool = False


def make_endpoint(service: Service) -> AnswerEndpoint:
    """The endpoint that creates responses."""
    return AnswerEndpoint(responses_endpoint(service.responses), service)


async def by_method(service: Service, request: Request) -> Response:
    """Read a response, or delete it."""
    name = request.path_params["id"]
    store = _store(service, name)
    if request.method == "DELETE":
        await service.abort([name])  # if it is still being made
        await run_in_threadpool(partial(store.delete, name, "response_id"))
        return json_response(Deleted(id=name))
    for field, value in request.query_params.items():
        if field != "stream" or value not in ("false", "0"):
            raise refused(field, value, "a stored response is read as a whole")
    found = await run_in_threadpool(partial(store.get, name, "response_id"))
    return Response(found.response, media_type="application/json")


async def cancel(service: Service, request: Request) -> Response:
    """End a response that is made in the background."""
    name = request.path_params["id"]
    store = _store(service, name)
    found = await run_in_threadpool(partial(store.get, name, "response_id"))
    if not found.is_background:
        raise refused("response_id", name, "only background responses can be cancelled")
    await run_in_threadpool(partial(store.cancel, name))
    await service.abort([name])
    return await by_method(service, request)


async def input_items(service: Service, request: Request) -> Response:
    """The items of the request and those before it."""
    name = request.path_params["id"]
    found = await run_in_threadpool(partial(_store(service, name).get, name, "response_id"))
    return json_response(InputItems(data=found.before))


def _store(service: Service, name: str) -> ResponseStore:
    if service.responses is None:
        raise NotFoundError(
            f"response_id={name!r:.80}: nothing is stored here; start the server with "
            "--response-store",
            parameter="response_id",
        )
    return service.responses
