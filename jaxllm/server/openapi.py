"""GET /openapi.json: what the server offers, described for programs.

The bodies come from the types of the protocol. Every route needs its entry here: without one there
is no document.
"""

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, NamedTuple

from starlette.routing import BaseRoute, Route

import jaxllm
from jaxllm.openai.chat import ChatRequest
from jaxllm.openai.chat_answer import ChatCompletion
from jaxllm.openai.chat_stream import ChatChunk
from jaxllm.openai.completion_answer import Completion
from jaxllm.openai.completion_stream import CompletionChunk
from jaxllm.openai.completions import CompletionRequest
from jaxllm.openai.errors import ErrorBody
from jaxllm.openai.fields import REQUEST_ID_IN_WORDS
from jaxllm.openai.models import ModelCard, ModelList
from jaxllm.openai.schema import (
    ANY_ENGINE,
    EngineBounds,
    Schema,
    answer_schemas,
    ref,
    request_schemas,
)
from jaxllm.server.admin import ADMIN_PATHS
from jaxllm.server.auth import OPEN_PATHS, Keys
from jaxllm.server.page.routes import PAGE_MEDIA_TYPES
from jaxllm.server.request_id import HEADER
from jaxllm.server.tokenize import (
    Detokenized,
    DetokenizeRequest,
    TokenizeChat,
    Tokenized,
    TokenizeText,
)


class Operation(NamedTuple):
    """What one method of one path does."""

    summary: str
    body: type | Schema | None = None  # of a request, as JSON
    answer: type | Schema | None = None  # with status 200, as JSON
    chunk: type | None = None  # of an answer that is streamed
    content_type: str | None = None  # of an answer that is no JSON
    errors: tuple[int, ...] = ()
    query: tuple[tuple[str, Schema], ...] = ()  # parameters in the URL, which may be left out


_TOKENIZE: Schema = {"anyOf": [ref(TokenizeText), ref(TokenizeChat)]}
_VERSION: Schema = {
    "type": "object",
    "properties": {"version": {"type": "string"}},
    "required": ["version"],
}
# What may be wrong with any request that has a body.
_OF_BODIES = (400, 404, 408, 413, 415, 500, 503)

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/health"): Operation("Whether the engine lives", errors=(503,)),
    ("GET", "/ping"): Operation("Whether the engine lives", errors=(503,)),
    ("POST", "/ping"): Operation("Whether the engine lives", errors=(503,)),
    ("GET", "/ready"): Operation("Whether the server takes requests", errors=(503,)),
    ("GET", "/version"): Operation("The version of the server", answer=_VERSION),
    ("GET", "/load"): Operation(
        "How many answers are under way",
        answer={"type": "object", "properties": {"server_load": {"type": "integer"}}},
    ),
    ("GET", "/metrics"): Operation(
        "Figures for Prometheus", content_type="text/plain", errors=(500,)
    ),
    ("GET", "/openapi.json"): Operation("This document", answer={"type": "object"}),
    ("GET", "/v1/models"): Operation("The names of the model", answer=ModelList),
    ("GET", "/v1/models/{name}"): Operation("One of them", answer=ModelCard, errors=(404,)),
    ("POST", "/v1/chat/completions"): Operation(
        "The next message of a conversation",
        body=ChatRequest,
        answer=ChatCompletion,
        chunk=ChatChunk,
        errors=_OF_BODIES,
    ),
    ("POST", "/v1/completions"): Operation(
        "The continuations of prompts",
        body=CompletionRequest,
        answer=Completion,
        chunk=CompletionChunk,
        errors=_OF_BODIES,
    ),
    ("POST", "/tokenize"): Operation(
        "The token ids of a text or a conversation",
        body=_TOKENIZE,
        answer=Tokenized,
        errors=_OF_BODIES,
    ),
    ("POST", "/detokenize"): Operation(
        "The text of token ids", body=DetokenizeRequest, answer=Detokenized, errors=_OF_BODIES
    ),
}


# What may be wrong with what an operator asks.
_OF_ADMIN = (400, 500, 503)

OPERATIONS |= {
    ("POST", "/sleep"): Operation(
        "Give memory back and let requests wait",
        errors=_OF_ADMIN,
        query=(
            ("level", {"type": "integer", "default": 1}),
            ("mode", {"enum": ["keep", "abort"], "default": "keep"}),
        ),
    ),
    ("POST", "/wake_up"): Operation(
        "Take memory again and go on",
        errors=_OF_ADMIN,
        query=(("tags", {"type": "array", "items": {"type": "string"}}),),
    ),
    ("GET", "/is_sleeping"): Operation(
        "Whether it sleeps",
        answer={"type": "object", "properties": {"is_sleeping": {"type": "boolean"}}},
        errors=_OF_ADMIN,
    ),
    ("POST", "/reset_prefix_cache"): Operation("Forget all prefixes", errors=(*_OF_ADMIN, 409)),
    ("GET", "/server_info"): Operation(
        "How the server was started", answer={"type": "object"}, errors=_OF_ADMIN
    ),
    ("POST", "/start_profile"): Operation("Begin a profile", errors=_OF_ADMIN),
    ("POST", "/stop_profile"): Operation("End it and write it", errors=_OF_ADMIN),
}

OPERATIONS |= {
    ("GET", url): Operation("A file of the page", content_type=media_type)
    for url, media_type in PAGE_MEDIA_TYPES.items()
}


def make_document(
    routes: Iterable[BaseRoute], keys: Keys, engine: EngineBounds = ANY_ENGINE
) -> dict[str, Any]:
    """Describe these routes, in front of an engine with these bounds; those without an entry are an
    error of ours."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        assert isinstance(route, Route) and route.methods, route
        path = route.path_format
        for method in sorted(route.methods - {"HEAD"}):
            described = _described(path, OPERATIONS[method, path], _key_of(path, keys))
            paths.setdefault(path, {})[method.lower()] = described
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "jaxllm", "version": jaxllm.__version__},
        "paths": paths,
        "components": {"schemas": _components(engine)},
    }
    schemes = {name: {"type": "http", "scheme": "bearer"} for name in _names(keys)}
    if schemes:
        document["components"]["securitySchemes"] = schemes
    return document


def _names(keys: Keys) -> list[str]:
    """The kinds of keys that somebody may be asked for."""
    return ["key"] * bool(keys.api) + ["admin_key"] * bool(keys.admin)


def _key_of(path: str, keys: Keys) -> str | None:
    """The kind of key that a path wants; None if it is open."""
    if path in OPEN_PATHS:
        return None
    kind = "admin_key" if path in ADMIN_PATHS and keys.admin else "key"
    return kind if kind in _names(keys) else None


def _described(path: str, operation: Operation, key: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": operation.summary, "responses": {}}
    if "{name}" in path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        found["parameters"] = [name]
    for parameter, schema in operation.query:
        described = {"name": parameter, "in": "query", "schema": schema}
        found.setdefault("parameters", []).append(described)
    if operation.body is not None:
        content = {"application/json": {"schema": _schema_of(operation.body)}}
        found["requestBody"] = {"required": True, "content": content}
        found.setdefault("parameters", []).append(_REQUEST_ID)
    found["responses"]["200"] = _response(200, _content(operation))
    for status in operation.errors:
        # The paths for those who watch the server answer with a status and nothing else.
        content = {} if path in OPEN_PATHS else _JSON_ERROR
        found["responses"][str(status)] = _response(status, content)
    if operation.body is not None:
        found["responses"]["431"] = _response(431, {"text/plain": {"schema": {"type": "string"}}})
    if key is not None:
        found["security"] = [{key: []}]
        found["responses"]["401"] = _response(401, _JSON_ERROR)
    return found


def _response(status: int, content: dict[str, Any]) -> dict[str, Any]:
    response: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    if content:
        response["content"] = content
    if status != 431:  # which is said before there is a request
        response["headers"] = {HEADER: {"schema": {"type": "string"}}}
    if status == 503 and content:
        response["headers"] |= {"Retry-After": {"schema": {"type": "string"}}}
    return response


def _content(operation: Operation) -> dict[str, Any]:
    if operation.content_type is not None:
        return {operation.content_type: {"schema": {"type": "string"}}}
    if operation.answer is None:
        return {}
    content: dict[str, Any] = {"application/json": {"schema": _schema_of(operation.answer)}}
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": _event(operation.chunk)}
    return content


def _event(chunk: type) -> Schema:
    """One event of a stream: a chunk or, if the answer fails on the way, an error; or the end."""
    message = {"anyOf": [ref(chunk), ref(ErrorBody)]}
    return {
        "description": "With stream=true. One event.",
        "type": "object",
        "properties": {
            "data": {
                "anyOf": [
                    {"const": "[DONE]", "description": "The last event."},
                    {
                        "type": "string",
                        "contentMediaType": "application/json",
                        "contentSchema": message,
                    },
                ]
            }
        },
        "required": ["data"],
    }


def _schema_of(given: type | Schema) -> Schema:
    return given if isinstance(given, dict) else ref(given)


def _components(engine: EngineBounds) -> dict[str, Schema]:
    requests = request_schemas(
        [ChatRequest, CompletionRequest, TokenizeText, TokenizeChat, DetokenizeRequest], engine
    )
    answers = answer_schemas(
        [ChatCompletion, ChatChunk, Completion, CompletionChunk, ModelList, ModelCard, Tokenized,
         Detokenized, ErrorBody]
    )  # fmt: skip
    assert not requests.keys() & answers.keys()
    return requests | answers


_JSON_ERROR = {"application/json": {"schema": ref(ErrorBody)}}
_REQUEST_ID = {
    "name": HEADER,
    "in": "header",
    "description": (
        f"The id that the answer shall have: {REQUEST_ID_IN_WORDS}. Another one is replaced, and "
        "in any case told in the head of the answer."
    ),
    "schema": {"type": "string"},
}
