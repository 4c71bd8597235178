"""Errors in the protocol's shape, each with its HTTP status."""

import re

import msgspec

from jaxllm.errors import EngineDeadError, JaxLLMError, ValidationError

MAX_MESSAGE_CHARS = 2000
MAX_PARAM_CHARS = 80


class NotFoundError(ValidationError):
    """The model or the path is not served here."""


class AnswerError(JaxLLMError):
    """The engine accepted a request and could not finish it."""


class UnavailableError(JaxLLMError):
    """The server is overloaded or shuts down."""


class ErrorInfo(msgspec.Struct, kw_only=True):
    """What went wrong; `code` is the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    """The body of an error response."""

    error: ErrorInfo


def error_body(error: Exception) -> ErrorBody:
    """Convert an exception to the protocol's shape. Hide details that are not meant for users."""
    message, param = str(error), None
    match error:
        case NotFoundError():
            code, kind, param = 404, "NotFoundError", error.parameter
        case ValidationError():
            code, kind, param = 400, "BadRequestError", error.parameter
        case UnavailableError():
            code, kind = 503, "ServiceUnavailableError"
        case EngineDeadError():
            code, kind = 503, "ServiceUnavailableError"
            message = "the engine has ended; see the server's log"
        case JaxLLMError():
            code, kind, message = 500, "InternalServerError", _PATH.sub("<path>", message)
        case _:
            code, kind, message = 500, "InternalServerError", "internal error; see the log"
    return make_error(message, kind, code, param)


def make_error(message: str, kind: str, code: int, param: str | None = None) -> ErrorBody:
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[: MAX_MESSAGE_CHARS - 3] + "..."
    param = param and param[:MAX_PARAM_CHARS]  # the client may have invented the field
    return ErrorBody(ErrorInfo(message=message, type=kind, param=param, code=code))


# A path on the engine's machine.
_PATH = re.compile(r"(?<![\w.:/])(?:~|\.{0,2})/[^\s'\":,;()]+")
