"""How a protocol writes errors and the events of a stream."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from jaxllm.openai.errors import ErrorBody


class Wire(NamedTuple):
    # Converts an error to the protocol's shape, and the type of that.
    error: Callable[[ErrorBody], msgspec.Struct]
    error_type: type[msgspec.Struct]
    # Whether an event has a name, which is the tag of its type.
    names_events: bool
    # What ends a stream, if something does that is no event.
    last: bytes


OPENAI = Wire(
    error=lambda body: body, error_type=ErrorBody, names_events=False, last=b"data: [DONE]\n\n"
)
