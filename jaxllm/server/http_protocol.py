"""HTTP on one connection: uvicorn's, with limits on the head of a request."""

import asyncio

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol


def limited_protocol(max_header_bytes: int, timeout_s: float) -> type[HttpToolsProtocol]:
    """A protocol that closes connections whose heads are too long or take too long."""

    class LimitedProtocol(HttpToolsProtocol):
        _head_bytes = 0  # that came before the head was complete
        _seen_bytes = 0  # of URL and headers, as the parser tells them
        _is_in_head = False
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            # What comes of the parser's callbacks is known once it has ended; before, only what has
            # come: a header that has no end is told to nobody.
            super().data_received(data)
            if self._is_in_head:
                self._head_bytes += len(data)
                if self._head_bytes > max_header_bytes and not self.transport.is_closing():
                    self.send_400_response("")
            if self.cycle is None or self.cycle.response_complete:
                self._watch()
            else:
                self._unwatch()

        def on_message_begin(self) -> None:
            self._is_in_head, self._head_bytes, self._seen_bytes = True, 0, 0
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._see(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._see(len(name) + len(value))  # also of trailers, after the body
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._is_in_head = False
            super().on_headers_complete()

        def send_400_response(self, msg: str) -> None:
            if max(self._head_bytes, self._seen_bytes) <= max_header_bytes:
                super().send_400_response(msg)
                return
            text = f"the head of the request is longer than {max_header_bytes} bytes".encode()
            self.transport.write(
                STATUS_LINE[431]
                + b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
                + b"content-length: %d\r\n\r\n%b" % (len(text), text)
            )
            self.transport.close()

        def _see(self, num_bytes: int) -> None:
            self._seen_bytes += num_bytes
            if self._seen_bytes > max_header_bytes:
                raise ValueError("too long")  # the parser takes it for a bad request

        def _watch(self) -> None:
            """From now on a head must be complete within the time."""
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
