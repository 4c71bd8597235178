"""Endpoints for operators that give a running server further adapters, and take them away.

A path in a request is a path on the server, so it must be below a directory that the server was
started with. Names and answers are vLLM's.
"""

import os
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jaxllm.errors import ValidationError, refused
from jaxllm.openai.errors import NotFoundError
from jaxllm.server.service import Service

_MAX_BODY_BYTES = 64 << 10

Body = TypeVar("Body")


class LoadAdapter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request for a further adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False  # whether it may take the name of another one


class UnloadAdapter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to take an adapter away."""

    lora_name: str
    lora_int_id: int | None = None  # the name suffices


async def load(service: Service, request: Request) -> Response:
    _check_is_alone(service)
    body = await _read(request, LoadAdapter)
    path = _allowed(service, body.lora_path)
    served, name = service.served, body.lora_name
    if name in served.names:
        raise refused("lora_name", name, "it is a name of the model; choose another")
    if served.adapters.get(name) is not None and not body.load_inplace:
        raise refused("lora_name", name, "an adapter has this name; give load_inplace=true")
    adapter = served.adapters.make(name, path)
    await service.engine.add_lora(adapter)
    served.adapters.add(adapter)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(service: Service, request: Request) -> Response:
    _check_is_alone(service)
    body = await _read(request, UnloadAdapter)
    name = body.lora_name
    adapter = service.served.adapters.remove(name)
    if adapter is None:
        raise NotFoundError(f"lora_name={name!r:.80}: no adapter has this name")
    await service.engine.remove_lora(adapter.lora_int_id)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _check_is_alone(service: Service) -> None:
    count = service.options.api_server_count
    if count > 1:
        raise ValidationError(
            f"--api-server-count={count}: each of these processes has names of its own; start the "
            "server with --lora-modules"
        )


def _allowed(service: Service, path: str) -> str:
    """The path with all links followed, if it is below an allowed directory."""
    real = os.path.realpath(os.path.expanduser(path))
    allowed = [os.path.realpath(one) for one in service.options.lora_dirs]
    if not any(os.path.commonpath([real, one]) == one for one in allowed):
        raise refused(
            "lora_path", path, "it is not below a directory that --lora-dirs allows; move it there"
        )
    if not os.path.isdir(real):
        raise refused("lora_path", path, "there is no such directory on the server")
    return real


async def _read(request: Request, kind: type[Body]) -> Body:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > _MAX_BODY_BYTES:
            raise ValidationError(f"the body is longer than {_MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValidationError(f"the body: {error}") from None
