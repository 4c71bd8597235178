"""Errors in the protocol's shape, each with the HTTP status that it is sent with."""

import msgspec

from jaxllm.errors import JaxLLMError, ValidationError


class NotFoundError(ValidationError):
    """The model, or the path, is not one that is served here."""


class AnswerError(JaxLLMError):
    """The engine accepted a request and could not finish it."""


class ErrorInfo(msgspec.Struct, kw_only=True):
    """What went wrong; `code` is the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    """The body of an answer that is an error."""

    error: ErrorInfo


def error_body(error: Exception) -> ErrorBody:
    """Say an error in the protocol's words. What is not meant for users is not shown to them."""
    message, param = str(error), None
    match error:
        case NotFoundError():
            code, kind, param = 404, "NotFoundError", error.parameter
        case ValidationError():
            code, kind, param = 400, "BadRequestError", error.parameter
        case JaxLLMError():
            code, kind = 500, "InternalServerError"
        case _:
            code, kind, message = 500, "InternalServerError", "internal error; see the log"
    return ErrorBody(ErrorInfo(message=message, type=kind, param=param, code=code))
