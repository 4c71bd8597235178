"""Errors of HTTP itself, and the conversion of every error to a response."""

import asyncio
from collections.abc import Mapping

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxllm.errors import JaxLLMError
from jaxllm.logging import init_logger
from jaxllm.openai.errors import ErrorBody, UnavailableError, error_body, make_error
from jaxllm.openai.wire import OPENAI, Wire

logger = init_logger(__name__)

RETRY_AFTER_S = 1


class Disconnected(Exception):
    """The client has gone or is too slow: nothing waits for the answer."""


class HTTPError(JaxLLMError):
    """A request is invalid at the level of HTTP."""

    def __init__(
        self, status: int, kind: str, message: str, headers: Mapping[str, str] | None = None
    ):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.headers = headers


def body_of(error: Exception) -> ErrorBody:
    """Return the body for the client, in OpenAI's shape; log an internal error."""
    if isinstance(error, HTTPError):
        return make_error(str(error), error.kind, error.status)
    body = error_body(error)
    if not isinstance(error, JaxLLMError):
        logger.error("a request failed", exc_info=error)
    elif body.error.code == 500:
        logger.error("a request failed: %s", error)
    return body


def error_response(error: Exception, wire: Wire = OPENAI) -> Response:
    body = body_of(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPError) else {}
    if isinstance(error, UnavailableError):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return json_response(wire.error(body), body.error.code, headers)


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


async def respond(
    response: Response, scope: Scope, receive: Receive, send: Send, timeout_s: float
) -> None:
    """Send a response; give up on a client that does not read it within this time."""
    try:
        async with asyncio.timeout(timeout_s):
            await response(scope, receive, send)
    except TimeoutError:
        logger.warning("a client did not take its answer within %s s", timeout_s)
