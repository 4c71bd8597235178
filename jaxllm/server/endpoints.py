"""Every endpoint of the server. Routes, keys, host names, metrics and /openapi.json follow this
table. A new endpoint needs a line here and a file of its own."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxllm.anthropic.endpoints import ANTHROPIC, MESSAGES
from jaxllm.anthropic.message import Message
from jaxllm.anthropic.request import CountTokensRequest, MessagesBody
from jaxllm.anthropic.stream import MessageEvent
from jaxllm.openai.batches.objects import Batch, BatchBody, BatchList, DeletedFile, File, FileList
from jaxllm.openai.chat import ChatRequest
from jaxllm.openai.chat_answer import ChatCompletion
from jaxllm.openai.chat_stream import ChatChunk
from jaxllm.openai.completion_answer import Completion
from jaxllm.openai.completion_stream import CompletionChunk
from jaxllm.openai.completions import CompletionRequest
from jaxllm.openai.endpoints import CHAT, COMPLETIONS
from jaxllm.openai.endpoints import Endpoint as AnsweredEndpoint
from jaxllm.openai.models import ModelCard, ModelList
from jaxllm.openai.pooling.endpoints import POOLING_PATHS
from jaxllm.openai.responses.endpoint import WIRE
from jaxllm.openai.responses.events import ResponseEvent
from jaxllm.openai.responses.request import ResponsesBody
from jaxllm.openai.responses.response import Response as ResponseBody
from jaxllm.openai.schema import Schema, ref
from jaxllm.server import adapters, admin, batches, files, responses, status
from jaxllm.server.answers import AnswerEndpoint
from jaxllm.server.auth import Keys
from jaxllm.server.count_tokens import TokenCount, count_tokens
from jaxllm.server.endpoint import Access, Endpoint, Handler, by
from jaxllm.server.json_endpoint import JSONEndpoint
from jaxllm.server.openapi import describe
from jaxllm.server.options import ServerOptions
from jaxllm.server.page.files import PAGE
from jaxllm.server.pooling import PoolingEndpoint
from jaxllm.server.render import Rendered, render_chat, render_completions
from jaxllm.server.service import Service
from jaxllm.server.tokenize import (
    Detokenized,
    DetokenizeRequest,
    TokenizeChat,
    Tokenized,
    TokenizeText,
    detokenize,
    tokenize,
)
from jaxllm.server.tokenizer_info import tokenizer_info

# Error statuses of any request with a body, and of admin requests.
_OF_BODIES = (400, 404, 408, 413, 415, 500, 503)
_OF_ADMIN = (400, 500, 503)


def _probe(path: str, handler: Handler, summary: str, *methods: str) -> Endpoint:
    return Endpoint(
        path, by(handler), summary, methods, access=Access.ANYBODY, is_counted=False, errors=(503,)
    )


def _posted(path: str, serve: Callable[[Service], object], summary: str, **more: Any) -> Endpoint:
    return Endpoint(path, serve, summary, ("POST",), errors=_OF_BODIES, **more)


def _answers(
    path: str, endpoint: AnsweredEndpoint, summary: str, body: type, answer: type, chunk: Any
) -> Endpoint:
    serve = partial(AnswerEndpoint, endpoint)
    return _posted(
        path, serve, summary, body=(body,), answer=answer, chunk=chunk, wire=endpoint.wire
    )


def _admin(
    path: str,
    handler: Handler,
    summary: str,
    method: str = "POST",
    *,
    body: type | None = None,
    answer: Schema | None = None,
    errors: tuple[int, ...] = _OF_ADMIN,
    **query: Schema,
) -> Endpoint:
    serve, parameters = by(admin.with_known_parameters(handler, query)), tuple(query.items())
    return Endpoint(
        path,
        serve,
        summary,
        (method,),
        Access.ADMIN,
        body=() if body is None else (body,),
        content_type=None if body is None else "text/plain",
        answer=answer,
        errors=errors,
        query=parameters,
    )


def _object(**properties: str) -> Schema:
    """The schema of an object with properties of these types."""
    types = {name: {"type": type_} for name, type_ in properties.items()}
    return {"type": "object", "properties": types, "required": list(types)}


def _part(most: int, **more: Schema) -> tuple[tuple[str, Schema], ...]:
    """Parameters that choose a part of a list."""
    limit = {"type": "integer", "minimum": 1, "maximum": most}
    return ("limit", limit), ("after", {"type": "string"}), *more.items()


_OF_FILES = _part(10_000, order={"enum": ["asc", "desc"]}, purpose={"type": "string"})
_UPLOAD: Schema = {
    "type": "object",
    "properties": {
        "purpose": {"const": "batch"},
        "file": {"contentMediaType": "application/octet-stream"},  # bytes, which have no type
    },
    "required": ["purpose", "file"],
    "additionalProperties": False,
}

FOR_USERS = (
    _probe("/health", status.health, "Whether the engine lives", "GET"),
    _probe("/ping", status.health, "Whether the engine lives", "GET", "POST"),
    _probe("/ready", status.ready, "Whether the server takes requests", "GET"),
    Endpoint("/version", by(status.version), "The version of the server", is_counted=False,
             answer=_object(version="string")),
    Endpoint("/metrics", by(status.expose_metrics), "Figures for Prometheus", is_counted=False,
             content_type="text/plain", errors=(500,)),
    Endpoint("/load", by(status.load), "How many answers are under way",
             answer=_object(server_load="integer")),
    Endpoint("/openapi.json", by(describe), "This document", answer=_object()),
    Endpoint("/v1/models", by(status.list_models), "The names of the model", answer=ModelList),
    Endpoint("/v1/models/{name:path}", by(status.show_model), "One of them", answer=ModelCard,
             errors=(404,)),
    _answers("/v1/chat/completions", CHAT, "The next message of a conversation", ChatRequest,
             ChatCompletion, ChatChunk),
    _answers("/v1/completions", COMPLETIONS, "The continuations of prompts", CompletionRequest,
             Completion, CompletionChunk),
    _posted("/v1/chat/completions/render", render_chat, "The prompt of such a conversation",
            body=(ChatRequest,), answer=Rendered),
    _posted("/v1/completions/render", render_completions, "The prompts of such a request",
            body=(CompletionRequest,), answer={"type": "array", "items": ref(Rendered)}),
    _posted("/v1/responses", responses.make_endpoint, "A response to items", body=(ResponsesBody,),
            answer=ResponseBody, chunk=ResponseEvent, wire=WIRE),
    Endpoint("/v1/responses/{id}", by(responses.by_method), "A stored response",
             ("GET", "DELETE"), answer=_object(), errors=(400, 404)),
    Endpoint("/v1/responses/{id}/cancel", by(responses.cancel), "End a background response",
             ("POST",), answer=_object(), errors=(400, 404)),
    Endpoint("/v1/responses/{id}/input_items", by(responses.input_items), "What it was made of",
             answer=responses.InputItems, errors=(404,)),
    Endpoint("/v1/files", by(files.upload_file), "Keep a file of requests", ("POST",),
             form=_UPLOAD, answer=File, errors=(400, 404, 408, 413, 415)),
    Endpoint("/v1/files", by(files.list_files), "The files that are kept", answer=FileList,
             errors=(400, 404), query=_OF_FILES),
    Endpoint("/v1/files/{id}", by(files.show_file), "One of them", answer=File,
             errors=(400, 404)),
    Endpoint("/v1/files/{id}", by(files.delete_file), "Delete it", ("DELETE",),
             answer=DeletedFile, errors=(400, 404)),
    Endpoint("/v1/files/{id}/content", by(files.file_content), "What is in it",
             content_type="application/octet-stream", errors=(400, 404)),
    _posted("/v1/batches", by(batches.create_batch), "Answer the requests of a file",
            body=(BatchBody,), answer=Batch),
    Endpoint("/v1/batches", by(batches.list_batches), "The batches", answer=BatchList,
             errors=(400, 404), query=_part(100)),
    Endpoint("/v1/batches/{id}", by(batches.show_batch), "One of them", answer=Batch,
             errors=(400, 404)),
    Endpoint("/v1/batches/{id}/cancel", by(batches.cancel_batch), "End it", ("POST",),
             answer=Batch, errors=(400, 404)),
    _answers("/v1/messages", MESSAGES, "The next message, in Anthropic's protocol", MessagesBody,
             Message, MessageEvent),
    _posted("/v1/messages/count_tokens", partial(JSONEndpoint, count_tokens, wire=ANTHROPIC),
            "The number of tokens of such a prompt", body=(CountTokensRequest,),
            answer=TokenCount, wire=ANTHROPIC),
    _posted("/tokenize", partial(JSONEndpoint, tokenize),
            "The token ids of a text or a conversation",
            body=(TokenizeText, TokenizeChat), answer=Tokenized),
    _posted("/detokenize", partial(JSONEndpoint, detokenize), "The text of token ids",
            body=(DetokenizeRequest,), answer=Detokenized),
)  # fmt: skip
# Of an engine that pools.
FOR_POOLING = tuple(
    _posted(path, partial(PoolingEndpoint, kind), summary, body=(kind,), answer=answer)
    for path, (kind, answer, summary) in POOLING_PATHS.items()
)
FOR_OPERATORS = (
    _admin("/sleep", admin.sleep, "Give memory back and let requests wait",
           level={"type": "integer", "default": 1},
           mode={"enum": ["keep", "abort"], "default": "keep"}),
    _admin("/wake_up", admin.wake_up, "Take memory again and go on",
           tags={"type": "array", "items": {"type": "string"}}),
    _admin("/is_sleeping", admin.is_sleeping, "Whether it sleeps", "GET",
           answer=_object(is_sleeping="boolean")),
    _admin("/reset_prefix_cache", admin.reset_prefix_cache, "Forget all prefixes",
           errors=(*_OF_ADMIN, 409)),
    Endpoint("/abort_requests", by(admin.abort_requests), "End requests by their ids, or all",
             ("POST",), Access.ADMIN, body=(admin.AbortRequests,),
             answer=_object(num_aborted="integer"), errors=_OF_BODIES),
    _admin("/server_info", admin.server_info, "How the server was started", "GET",
           answer=_object()),
)  # fmt: skip
OF_TOKENIZER = (
    Endpoint("/tokenizer_info", by(tokenizer_info), "The tokenizer's configuration",
             answer=_object(), errors=(400,)),
)  # fmt: skip
OF_PROFILER = (
    _admin("/start_profile", admin.start_profile, "Begin a profile"),
    _admin("/stop_profile", admin.stop_profile, "End it and write it"),
)
OF_ADAPTERS = (
    _admin("/v1/load_lora_adapter", adapters.load, "Serve a further adapter",
           body=adapters.LoadAdapter, errors=_OF_BODIES),
    _admin("/v1/unload_lora_adapter", adapters.unload, "Serve an adapter no longer",
           body=adapters.UnloadAdapter, errors=_OF_BODIES),
)  # fmt: skip
ENDPOINTS = (
    *FOR_USERS, *FOR_POOLING, *OF_TOKENIZER, *PAGE, *FOR_OPERATORS, *OF_PROFILER, *OF_ADAPTERS
)  # fmt: skip


def offered(service: Service, keys: Keys) -> list[Endpoint]:
    """Those that a server has."""
    found = for_users(service.options, pools=service.engine.info.pooling is not None)
    if keys.admin or service.options.admin_without_key:
        found += FOR_OPERATORS
        if service.engine.config.profiler.profile_dir is not None:
            found += OF_PROFILER
        if service.engine.info.adapters is not None:
            found += OF_ADAPTERS
    return found


def for_users(options: ServerOptions, *, pools: bool) -> list[Endpoint]:
    """Those that need no admin key."""
    found = list(FOR_USERS)
    if pools:
        found += FOR_POOLING
    if options.enable_tokenizer_info_endpoint:
        found += OF_TOKENIZER
    if not options.disable_page:
        found += PAGE
    if options.metrics_without_key:
        found = [_without_key(one) if one.path == "/metrics" else one for one in found]
    return found


def _without_key(endpoint: Endpoint) -> Endpoint:
    return dataclasses.replace(endpoint, access=Access.WITHOUT_KEY)
