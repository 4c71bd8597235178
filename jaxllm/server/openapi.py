"""GET /openapi.json: a description of the endpoints, with the types of the protocol."""

import dataclasses
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

import jaxllm
from jaxllm.openai.fields import REQUEST_ID_IN_WORDS
from jaxllm.openai.schema import (
    ANY_ENGINE,
    EngineBounds,
    Schema,
    answer_schemas,
    ref,
    request_schemas,
)
from jaxllm.openai.wire import Wire
from jaxllm.server.auth import Keys
from jaxllm.server.endpoint import Access, Endpoint
from jaxllm.server.errors import json_response
from jaxllm.server.request_id import HEADER
from jaxllm.server.service import Service


async def describe(service: Service, request: Request) -> Response:
    return json_response(request.app.state.describe(bounds_of(service)))


def bounds_of(service: Service) -> EngineBounds:
    """The bounds of this engine."""
    info, served = service.engine.info, service.served
    most = service.admission.max_answers
    return EngineBounds(
        vocab_size=info.vocab_size,
        max_logprobs=info.max_logprobs,
        max_model_len=info.max_model_len,
        **({} if most is None else {"max_n": most}),
        takes_empty_text=served.tokenizer is not None and bool(served.tokenizer.start_of_document),
        has_priorities=service.engine.config.scheduler.scheduling_policy != "fcfs",
        takes_embeds=info.embeds is not None,
    )


def widest(some: Sequence[EngineBounds]) -> EngineBounds:
    """Bounds that refuse nothing which one of some engines takes."""
    names = (f.name for f in dataclasses.fields(EngineBounds))
    return EngineBounds(**{name: max(getattr(one, name) for one in some) for name in names})


def make_document(
    endpoints: Iterable[Endpoint], keys: Keys, engine: EngineBounds = ANY_ENGINE
) -> dict[str, Any]:
    """Describe these endpoints for an engine with these bounds."""
    endpoints = list(endpoints)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "jaxllm", "version": jaxllm.__version__},
        "paths": {},
        "components": {"schemas": _components(endpoints, engine)},
    }
    for one in endpoints:
        operations = document["paths"].setdefault(compile_path(one.path)[1], {})
        operations |= dict.fromkeys(map(str.lower, sorted(one.methods)), _described(one, keys))
    schemes = {_scheme(one, keys): {"type": "http", "scheme": "bearer"} for one in endpoints}
    schemes.pop(None, None)
    if schemes:
        document["components"]["securitySchemes"] = schemes
    return document


def _scheme(endpoint: Endpoint, keys: Keys) -> str | None:
    """The kind of key that an endpoint needs; None if it is open."""
    if not keys.for_access(endpoint.access):
        return None
    return "admin_key" if endpoint.access is Access.ADMIN and keys.admin else "key"


def _described(endpoint: Endpoint, keys: Keys) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": endpoint.summary, "responses": {}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in compile_path(endpoint.path)[2]
    ]
    for name, schema in endpoint.query:
        parameters.append({"name": name, "in": "query", "schema": schema})
    if endpoint.form is not None:
        form = {"multipart/form-data": {"schema": endpoint.form}}
        found["requestBody"] = {"required": True, "content": form}
    if endpoint.body:
        content = {"application/json": {"schema": _one_of(endpoint.body)}}
        found["requestBody"] = {"required": True, "content": content}
        parameters.append(_REQUEST_ID)
    if parameters:
        found["parameters"] = parameters
    found["responses"]["200"] = _response(200, _content(endpoint))
    for status in endpoint.errors:
        content = {} if endpoint.access is Access.ANYBODY else _json_error(endpoint.wire)
        found["responses"][str(status)] = _response(status, content)
    if endpoint.body:
        found["responses"]["431"] = _response(431, {"text/plain": {"schema": {"type": "string"}}})
    scheme = _scheme(endpoint, keys)
    if scheme is not None:
        found["security"] = [{scheme: []}]
        found["responses"]["401"] = _response(401, _json_error(endpoint.wire))
    return found


def _response(status: int, content: dict[str, Any]) -> dict[str, Any]:
    response: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    if content:
        response["content"] = content
    if status != 431:  # sent before there is a request
        response["headers"] = {HEADER: {"schema": {"type": "string"}}}
    if status == 503 and content:
        response["headers"] |= {"Retry-After": {"schema": {"type": "string"}}}
    return response


def _content(endpoint: Endpoint) -> dict[str, Any]:
    if endpoint.content_type is not None:
        return {endpoint.content_type: {"schema": {"type": "string"}}}
    if endpoint.answer is None:
        return {}
    answer = endpoint.answer if isinstance(endpoint.answer, dict) else ref(endpoint.answer)
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if endpoint.chunk is not None:
        content["text/event-stream"] = {"schema": _event(endpoint)}
    return content


def _event(endpoint: Endpoint) -> Schema:
    """One event of a stream: a chunk, the end, or an error if the answer fails later."""
    wire = endpoint.wire
    data: Schema = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [*map(ref, _chunks(endpoint)), ref(wire.error_type)]},
    }
    if wire.last:
        data = {"anyOf": [{"const": "[DONE]", "description": "The last event."}, data]}
    names = {"event": {"type": "string"}} if wire.names_events else {}
    properties = {**names, "data": data}
    return {
        "description": "With stream=true. One event.",
        "type": "object",
        "properties": properties,
        "required": list(properties),
    }


def _chunks(endpoint: Endpoint) -> tuple[type, ...]:
    """The types of a stream's events."""
    return get_args(endpoint.chunk) or (() if endpoint.chunk is None else (endpoint.chunk,))


def _one_of(kinds: Sequence[type]) -> Schema:
    return ref(kinds[0]) if len(kinds) == 1 else {"anyOf": list(map(ref, kinds))}


def _components(endpoints: Iterable[Endpoint], engine: EngineBounds) -> dict[str, Schema]:
    bodies: list[type] = []
    answers: list[type] = []
    for endpoint in endpoints:
        bodies += endpoint.body
        answers += [endpoint.wire.error_type, *_chunks(endpoint)]
        answers += [endpoint.answer] if isinstance(endpoint.answer, type) else []
    answers = list(dict.fromkeys(answers))
    requests, replies = request_schemas(bodies, engine), answer_schemas(answers)
    assert not requests.keys() & replies.keys()
    return requests | replies


def _json_error(wire: Wire) -> dict[str, Any]:
    return {"application/json": {"schema": ref(wire.error_type)}}


_REQUEST_ID = {
    "name": HEADER,
    "in": "header",
    "description": (
        f"The id that the answer shall have: {REQUEST_ID_IN_WORDS}. Another one is replaced, and "
        "in any case told in the head of the answer."
    ),
    "schema": {"type": "string"},
}
