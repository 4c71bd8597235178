"""Which trace a request is part of, as W3C's Trace Context has it."""

from starlette.types import Scope

_NAMES = {b"traceparent": "traceparent", b"tracestate": "tracestate"}


def trace_headers(scope: Scope) -> dict[str, str] | None:
    """The headers that say so; of several of one name, one with the values of all."""
    found: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        if name in _NAMES:
            found.setdefault(_NAMES[name], []).append(value.decode("latin-1"))
    return {name: ",".join(values) for name, values in found.items()} or None
