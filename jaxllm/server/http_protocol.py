"""uvicorn's HTTP protocol, with limits on the head of a request."""

import asyncio

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

# Seconds that an idle connection is kept. Clients keep theirs for 5 s. If the server closed them
# then, too, a request that comes after 5 s could meet a connection that is being closed.
KEEP_IDLE_S = 60


def limited_protocol(max_header_bytes: int, timeout_s: float) -> type[HttpToolsProtocol]:
    """Make a protocol that closes connections whose heads are too long or take too long."""

    class LimitedProtocol(HttpToolsProtocol):
        _head_bytes = 0  # of URL, headers and trailers, as the parser reports them
        _silent_bytes = 0  # since the parser's last report: a header without an end
        _was_told = False
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._was_told = False
            super().data_received(data)
            self._silent_bytes = 0 if self._was_told else self._silent_bytes + len(data)
            if self._silent_bytes > max_header_bytes and not self.transport.is_closing():
                self.send_400_response("")
            if self.cycle is None or self.cycle.response_complete:
                self._watch()
            else:
                self._unwatch()

        def on_message_begin(self) -> None:
            self._head_bytes = 0
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value))
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            assert self.parser is not None
            if self.parser.get_http_version() not in ("1.0", "1.1"):
                # An HTTP/0.9 client would take the head of our answer for content.
                raise ValueError("no such version")
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._was_told = True
            super().on_body(body)

        def send_400_response(self, msg: str) -> None:
            if max(self._head_bytes, self._silent_bytes) <= max_header_bytes:
                super().send_400_response(msg)
                return
            text = f"the head of the request is longer than {max_header_bytes} bytes".encode()
            self.transport.write(
                STATUS_LINE[431]
                + b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
                + b"content-length: %d\r\n\r\n%b" % (len(text), text)
            )
            self.transport.close()

        def _count(self, num_bytes: int) -> None:
            self._was_told = True
            self._head_bytes += num_bytes
            if self._head_bytes > max_header_bytes:
                raise ValueError("too long")  # the parser answers with "bad request"

        def _watch(self) -> None:
            """Start the time limit of the next head."""
            if self._timer is None:
                self._timer = self.loop.call_later(timeout_s, self._give_up)

        def _unwatch(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            if not self.transport.is_closing():
                self.transport.close()

    return LimitedProtocol
