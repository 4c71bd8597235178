"""Errors in Anthropic's shape."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.openai.errors import ErrorBody

ErrorType = Literal[
    "invalid_request_error", "authentication_error", "permission_error", "not_found_error",
    "request_too_large", "timeout_error", "overloaded_error", "api_error",
]  # fmt: skip
_TYPES: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class MessagesErrorDetails(msgspec.Struct, kw_only=True):
    """What a client may do about an error."""

    error_code: Literal["thread_unsupported_request"]


class MessagesErrorInfo(msgspec.Struct, kw_only=True):
    type: ErrorType
    message: str
    details: MessagesErrorDetails | UnsetType = UNSET


class MessagesError(msgspec.Struct, kw_only=True, tag_field="type", tag="error"):
    """The body of an error response, and an event of a stream that fails."""

    error: MessagesErrorInfo


def in_its_shape(body: ErrorBody) -> MessagesError:
    """Convert an error that is in OpenAI's shape."""
    code = body.error.code
    kind = _TYPES.get(code, "api_error" if code >= 500 else "invalid_request_error")
    details = UNSET
    if body.error.param == "thread":
        # Then Anthropic's client sends the whole conversation instead.
        details = MessagesErrorDetails(error_code="thread_unsupported_request")
    info = MessagesErrorInfo(type=kind, message=body.error.message, details=details)
    return MessagesError(error=info)
