"""The body of a request: limits hold while it is read, not after."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from jaxllm.errors import ValidationError
from jaxllm.openai.wording import why_not_json
from jaxllm.server.errors import Disconnected, HTTPError
from jaxllm.server.options import ServerOptions

# What is not read of a body must not be taken for the next request.
_CLOSE = {"Connection": "close"}


async def read_body(
    scope: Scope, receive: Receive, options: ServerOptions, admit: Callable[[int], None]
) -> bytes:
    """The bytes of a JSON body; `admit` is asked before a part of it is kept."""
    headers = Headers(scope=scope)
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        # Also keeps web pages out, which may send anything but this without being asked.
        raise _unsupported("Content-Type", content_type, "use application/json")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise _unsupported("Content-Encoding", encoding, "send the body as it is")
    length = headers.get("content-length", "0")
    if length.isdigit() and len(length) < 20 and int(length) > options.max_body_bytes:
        raise _too_long(options)
    try:
        async with asyncio.timeout(options.client_timeout):
            return await _read(receive, options, admit)
    except TimeoutError:
        raise HTTPError(
            408,
            "RequestTimeoutError",
            f"the body did not come within {options.client_timeout} s",
            _CLOSE,
        ) from None


def _unsupported(name: str, value: str, remedy: str) -> HTTPError:
    message = f"{name} {value!r:.80} is not supported; {remedy}"
    return HTTPError(415, "UnsupportedMediaTypeError", message, _CLOSE)


async def _read(receive: Receive, options: ServerOptions, admit: Callable[[int], None]) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        part = message.get("body", b"")
        admit(len(part))
        body += part
        if len(body) > options.max_body_bytes:
            raise _too_long(options)
        if not message.get("more_body", False):
            return bytes(body)


def _too_long(options: ServerOptions) -> HTTPError:
    return HTTPError(
        413,
        "RequestTooLargeError",
        f"the body is longer than {options.max_body_bytes} bytes (--max-body-bytes)",
        _CLOSE,
    )


def decode_json(body: bytes, max_depth: int) -> Any:
    """The value of a body that is nested no deeper than this."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = why_not_json(body, error)
        raise ValidationError(f"the body is not JSON: {why}", parameter="body") from None
    level = [value]
    for _ in range(max_depth):
        level = [one for outer in level for one in _inside(outer) if isinstance(one, dict | list)]
        if not level:
            return value
    raise _too_deep(max_depth)


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep(max_depth: int) -> ValidationError:
    return ValidationError(
        f"the body is nested deeper than {max_depth} levels (--max-json-depth)", parameter="body"
    )
