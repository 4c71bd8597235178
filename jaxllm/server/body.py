"""Reads the body of a request, and enforces limits while it reads."""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from jaxllm.errors import ValidationError
from jaxllm.files import is_nested_deeper
from jaxllm.openai.wording import why_not_json
from jaxllm.server.errors import Disconnected, HTTPError
from jaxllm.server.options import ServerOptions

# Close the connection, so that the unread rest of a body is not parsed as the next request.
_CLOSE = {"Connection": "close"}

_MEDIA_BYTES = 64 << 20


class BodyLimits(NamedTuple):
    """The limits of a body's size and of the time to send it."""

    max_bytes: int
    timeout_s: float

    @classmethod
    def of(
        cls, options: ServerOptions, max_model_len: int, *, has_media: bool = False
    ) -> "BodyLimits":
        """The limits of the options. The default fits the longest prompt in any encoding: a token
        is a few bytes of text, and JSON may escape each as six bytes. The constant is for other
        fields and for several prompts. Images and embeddings in it are some megabytes each."""
        default = (4 << 20) + 64 * max_model_len + (has_media and _MEDIA_BYTES)
        return cls(options.max_body_bytes or default, options.client_timeout)


async def read_body(
    scope: Scope, receive: Receive, limits: BodyLimits, admit: Callable[[int], None]
) -> bytes:
    """Read a JSON body; call `admit` before a part of it is kept."""
    headers = Headers(scope=scope)
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        # This check also keeps web pages out: without CORS they cannot send this content type.
        raise _unsupported("Content-Type", content_type, "use application/json")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise _unsupported("Content-Encoding", encoding, "send the body as it is")
    length = headers.get("content-length", "0")
    if length.isdigit() and len(length) < 20 and int(length) > limits.max_bytes:
        raise _too_long(limits)
    try:
        async with asyncio.timeout(limits.timeout_s):
            return await _read(receive, limits, admit)
    except TimeoutError:
        raise HTTPError(
            408,
            "RequestTimeoutError",
            f"the body did not come within {limits.timeout_s} s",
            _CLOSE,
        ) from None


def _unsupported(name: str, value: str, remedy: str) -> HTTPError:
    message = f"{name} {value!r:.80} is not supported; {remedy}"
    return HTTPError(415, "UnsupportedMediaTypeError", message, _CLOSE)


async def _read(receive: Receive, limits: BodyLimits, admit: Callable[[int], None]) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        part = message.get("body", b"")
        admit(len(part))
        body += part
        if len(body) > limits.max_bytes:
            raise _too_long(limits)
        if not message.get("more_body", False):
            return bytes(body)


def _too_long(limits: BodyLimits) -> HTTPError:
    return HTTPError(
        413,
        "RequestTooLargeError",
        f"the body is longer than {limits.max_bytes} bytes (--max-body-bytes)",
        _CLOSE,
    )


def decode_json(body: bytes, max_depth: int) -> Any:
    """Decode a body; refuse one that is nested too deeply."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = why_not_json(body, error)
        raise ValidationError(f"the body is not JSON: {why}", parameter="body") from None
    if is_nested_deeper(value, max_depth):
        raise _too_deep(max_depth)
    return value


def _too_deep(max_depth: int) -> ValidationError:
    return ValidationError(
        f"the body is nested deeper than {max_depth} levels (--max-json-depth)", parameter="body"
    )
