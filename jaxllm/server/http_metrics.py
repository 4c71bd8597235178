"""Counts HTTP requests by path and status, and their duration up to the end of a stream.

The names have no prefix, as in other Python servers. All paths that do not exist count as one.
"""

import time
from collections.abc import Collection, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.server.metrics import SECONDS

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# The status of a request whose client left before the answer began.
_CLIENT_LEFT = "499"


class HTTPMetrics:
    """A middleware outside of all others, because the others may refuse requests."""

    def __init__(
        self,
        app: ASGIApp,
        routes: Sequence[Route],
        uncounted: Collection[str],
        registry: CollectorRegistry,
    ):
        self._app = app
        self._uncounted = uncounted
        self._routes = routes
        self._requests = Counter(
            "http_requests",
            "Requests over HTTP.",
            ("handler", "method", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "From the head of a request to the end of its answer.",
            ("handler", "method"),
            buckets=SECONDS,
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._uncounted:
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status = _CLIENT_LEFT

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = "500"  # an outer middleware makes this of the exception
            raise
        finally:
            handler = self._handler(scope["path"])
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._requests.labels(handler, method, status).inc()
            self._seconds.labels(handler, method).observe(time.perf_counter() - start)

    def _handler(self, path: str) -> str:
        """The declared path. It bounds the number of label values."""
        return next((one.path for one in self._routes if one.path_regex.match(path)), "none")
