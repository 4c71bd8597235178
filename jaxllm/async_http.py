"""HTTP/1.1 to one server with little overhead, so that a benchmark or a router is not the
bottleneck.

A body is passed on directly from the socket, without a queue or a task between.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import httptools

from jaxllm.errors import JaxLLMError, refused

# Called with the status and a piece of the body.
Sink = Callable[[int, bytes], None]
# Called before that with the status and the headers, whose names are in small letters.
OnHead = Callable[[int, dict[bytes, bytes]], None]

# Servers close idle connections (often after 5 s), so old ones are not used.
_MAX_IDLE_S = 2.0


class BrokenConnectionError(JaxLLMError):
    """The connection ended before the response did."""


class NotConnectedError(OSError):
    """There was no connection, so the server knows nothing of the request."""


class _UnansweredError(BrokenConnectionError):
    """No byte of the response has arrived."""


class HTTPClient:
    """Reusable connections to one server. All methods must run on one event loop."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        *,
        insecure: bool = False,
        once: bool = False,
        connect_timeout: float | None = None,
    ):
        """With `once` no request is sent twice, as one is over a connection that the server has
        closed since, and NotConnectedError says that the server knows nothing of a request."""
        try:
            url = urlsplit(base_url)
            port = url.port
        except ValueError as error:  # invalid port or brackets
            raise refused("base_url", base_url, str(error)) from None
        if url.scheme not in ("http", "https") or url.hostname is None:
            raise refused("base_url", base_url, "it must be http://HOST:PORT or https://HOST:PORT")
        self.base_url = base_url
        self._host = url.hostname
        self._port = port or (443 if url.scheme == "https" else 80)
        self._prefix = url.path.rstrip("/")
        self._ssl = _context(insecure) if url.scheme == "https" else None
        lines = {"Host": url.netloc.rpartition("@")[2], **headers}
        for name, value in lines.items():
            if any(character in name + value for character in "\r\n"):
                raise refused("header", f"{name}={value}", "a header is one line")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[tuple[float, _Connection]] = []
        self._once = once
        self._connect_timeout = connect_timeout

    async def get(self, path: str, sink: Sink) -> int:
        return await self.request("GET", path, b"", {}, sink)

    async def post(self, path: str, body: bytes, sink: Sink) -> int:
        """Send JSON; return the status when the response is complete."""
        return await self.request("POST", path, body, {"Content-Type": "application/json"}, sink)

    async def request(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        sink: Sink,
        on_head: OnHead = lambda status, headers: None,
    ) -> int:
        """Send a request with these headers, too; return the status when the response is
        complete."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        if body or method != "GET":
            lines += f"Content-Length: {len(body)}\r\n"
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}{lines}\r\n"
        return await self._send(head, body, sink, on_head)

    def close(self) -> None:
        for _, connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _send(self, head: str, body: bytes, sink: Sink, on_head: OnHead) -> int:
        try:
            request = head.encode("latin-1") + body
        except UnicodeEncodeError as error:
            bad = error.object[error.start : error.end]
            raise refused("header", bad, "addresses and headers are in Latin-1 only") from None
        while (connection := self._take_idle()) is not None:
            try:
                return await self._exchange(connection, request, sink, on_head)
            except _UnansweredError:
                pass  # the server closed the connection before it saw the request
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection, self._host, self._port, ssl=self._ssl
                )
        except OSError as error:  # TimeoutError is one, too
            if not self._once:
                raise
            raise NotConnectedError(*error.args) from error
        return await self._exchange(connection, request, sink, on_head)

    async def _exchange(
        self, connection: "_Connection", request: bytes, sink: Sink, on_head: OnHead
    ) -> int:
        try:
            status = await connection.exchange(request, sink, on_head)
        except BaseException:
            connection.close()
            raise
        if connection.is_reusable and not self._once:
            self._idle.append((time.monotonic(), connection))
        else:
            connection.close()
        return status

    def _take_idle(self) -> "_Connection | None":
        while self._idle:
            since, connection = self._idle.pop()
            if connection.is_reusable and time.monotonic() - since < _MAX_IDLE_S:
                return connection
            connection.close()
        return None


class _Connection(asyncio.Protocol):
    """A connection for one request at a time."""

    def __init__(self) -> None:
        self.is_reusable = False
        self._transport: asyncio.Transport
        self._response: asyncio.Future[int] | None = None

    async def exchange(self, request: bytes, sink: Sink, on_head: OnHead) -> int:
        """Send a request and pass on the body of the response; return its status."""
        self.is_reusable = False
        self._sink, self._on_head = sink, on_head
        self._headers: dict[bytes, bytes] = {}
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._has_begun = False
        self._ends_with_connection = True
        self._response = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._response

    def close(self) -> None:
        self._transport.close()

    # The event loop calls these.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._response is None:
            self.is_reusable = False  # data without a request
            return
        self._has_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(BrokenConnectionError(f"not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        if self._status and self._ends_with_connection and exc is None:
            self.on_message_complete()
        else:
            reason = f" ({exc})" if exc else ""
            if self._has_begun:
                where, kind = "in the middle of the response", BrokenConnectionError
            else:
                where, kind = "without a response", _UnansweredError
            self._fail(kind(f"the connection ended {where}{reason}"))

    # The parser calls these.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._status >= 200:
            self._on_head(self._status, self._headers)

    def on_body(self, body: bytes) -> None:
        self._sink(self._status, body)

    def on_message_complete(self) -> None:
        if self._status < 200:
            return  # the final response follows
        self.is_reusable = self._parser.should_keep_alive() and not self._ends_with_connection
        response, self._response = self._response, None
        if response is not None and not response.done():
            response.set_result(self._status)

    def _fail(self, error: Exception) -> None:
        self._transport.close()
        response, self._response = self._response, None
        if response is not None and not response.done():
            response.set_exception(error)


def _context(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
