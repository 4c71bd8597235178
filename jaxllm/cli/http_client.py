"""HTTP to an OpenAI-compatible server, with the standard library: JSON and event streams."""

import contextlib
import http.client
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from jaxllm.errors import JaxLLMError, UnauthorizedError, ValidationError, refused

# The time limit to connect, and for an answer that does not need the model.
_TIMEOUT_S = 30.0
# The interval of checking whether the caller has stopped a stream.
_LOOK_S = 0.05
_UNREACHED = (ConnectionError, TimeoutError, socket.gaierror)
_MAX_ERROR_BYTES = 1 << 20


class HTTPClient:
    """Requests paths below a base URL such as http://localhost:8000/v1."""

    def __init__(self, url: str, api_key: str | None = None):
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise refused("url", url, f"{error}; give one like http://localhost:8000/v1") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise refused("url", url, "give one like http://localhost:8000/v1")
        self.url = url.rstrip("/")
        self._host, self._port = parts.hostname, port
        self._is_secure = parts.scheme == "https"
        self._base = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ValidationError("api_key: a key is printable ASCII; look at what was given")
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> bytes:
        """Return the body of an answer."""
        with contextlib.closing(self._connect()) as connection:
            with self._errors_told():
                return self._send(connection, "GET", path).read()

    def stream(self, path: str, body: dict[str, Any], stop: threading.Event) -> Iterator[bytes]:
        """Yield the data of an answer's events, until its end or until `stop` is set. Closing the
        generator closes the connection.

        A thread reads the events, because a blocking read could not be interrupted here. The thread
        ends at the latest when its connection is closed.
        """
        exchange = _Exchange()

        def read() -> None:
            try:
                with self._errors_told(), contextlib.closing(self._connect()) as connection:
                    exchange.begin(connection.sock)
                    for data in _events(self._send(connection, "POST", path, body)):
                        exchange.events.put(data)
                exchange.events.put(None)
            except Exception as error:  # raised in the thread that waits for events
                exchange.events.put(error)

        threading.Thread(target=read, daemon=True).start()
        try:
            while not stop.is_set():
                try:
                    event = exchange.events.get(timeout=_LOOK_S)
                except queue.Empty:
                    continue
                if event is None:
                    return
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            exchange.hang_up()

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_TIMEOUT_S)
        with self._errors_told():
            connection.connect()
        return connection

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: object = None
    ) -> http.client.HTTPResponse:
        data = None if body is None else msgspec.json.encode(body)
        connection.request(method, f"{self._base}/{path}", data, self._headers)
        response = connection.getresponse()
        if response.status != 200:
            said = _message(response.read(_MAX_ERROR_BYTES))
            if response.status == 401:
                raise UnauthorizedError(f"{self.url}: {said}")
            hint = "; does --url end with /v1?" if response.status == 404 else ""
            raise JaxLLMError(f"{self.url}/{path}: status {response.status}: {said}{hint}")
        return response

    @contextlib.contextmanager
    def _errors_told(self) -> Iterator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            hint = "; is the server there?" if isinstance(error, _UNREACHED) else ""
            raise JaxLLMError(f"{self.url}: {reason}{hint}") from error


class _Exchange:
    """The state that the thread that reads a stream shares with the one that waits for it."""

    def __init__(self) -> None:
        # The last item is an exception or None.
        self.events: queue.SimpleQueue[bytes | Exception | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_over = False

    def begin(self, connected: socket.socket) -> None:
        """Register the connection. From now on there is no time limit."""
        with self._lock:
            connected.settimeout(None)
            self._socket = connected
            if self._is_over:
                self._shut_down()

    def hang_up(self) -> None:
        """Close the connection, for the server and for the thread that reads."""
        with self._lock:
            self._is_over = True
            self._shut_down()

    def _shut_down(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the socket may be closed
                self._socket.shutdown(socket.SHUT_RDWR)


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    for line in response:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield data
    raise http.client.HTTPException("the connection ended in the midst of an answer")


class _Error(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _Error


def _message(body: bytes) -> str:
    """The message of an error in OpenAI's form or any other."""
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.message
    except (msgspec.DecodeError, RecursionError):
        return body.decode(errors="replace")[:500].strip() or "no reason is given"
