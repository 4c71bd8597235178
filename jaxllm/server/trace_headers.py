"""The trace that a request is part of, by the W3C Trace Context headers."""

from starlette.types import Scope

_NAMES = {b"traceparent": "traceparent", b"tracestate": "tracestate"}


def trace_headers(scope: Scope) -> dict[str, str] | None:
    """Return the headers; join several of one name."""
    found: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        if name in _NAMES:
            found.setdefault(_NAMES[name], []).append(value.decode("latin-1"))
    return {name: ",".join(values) for name, values in found.items()} or None
