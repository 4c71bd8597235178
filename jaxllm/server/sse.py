"""Server-sent events: a streamed answer, one `data:` line for each chunk."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import msgspec
from starlette.types import Message, Send

from jaxllm.openai.wire import OPENAI, Wire
from jaxllm.server.errors import Disconnected

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not buffer the stream
]
_KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients skip


class EventStream:
    """Writes events to a client. The response starts with the first event. Until then an error can
    still be a response with its own status."""

    def __init__(self, send: Send, timeout_s: float, wire: Wire = OPENAI):
        self._send = send
        self._wire = wire
        self._timeout_s = timeout_s
        self._encoder = msgspec.json.Encoder()
        self._lock = asyncio.Lock()
        self._last_write = 0.0
        self.has_begun = False

    async def write(self, events: Sequence[msgspec.Struct]) -> None:
        if events:
            await self._write(b"".join(map(self._encoded, events)), more=True)

    @contextlib.asynccontextmanager
    async def kept_alive(self, every_s: float) -> AsyncIterator[None]:
        """Within this context, send a comment after this many seconds without an event, so that no
        proxy closes the connection as idle. 0 means never."""
        task = asyncio.create_task(self._keep_alive(every_s)) if every_s else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _keep_alive(self, every_s: float) -> None:
        clock = asyncio.get_running_loop().time
        self._last_write = clock()
        while True:
            await asyncio.sleep(self._last_write + every_s - clock())
            if clock() >= self._last_write + every_s:
                await self._write(_KEEP_ALIVE, more=True)

    async def end(self) -> None:
        await self._write(self._wire.last, more=False)

    def _encoded(self, event: msgspec.Struct) -> bytes:
        data = b"data: %b\n\n" % self._encoder.encode(event)
        if not self._wire.names_events:
            return data
        return b"event: %b\n%b" % (str(event.__struct_config__.tag).encode(), data)

    async def _write(self, data: bytes, *, more: bool) -> None:
        message: Message = {"type": "http.response.body", "body": data, "more_body": more}
        try:
            async with asyncio.timeout(self._timeout_s), self._lock:
                if not self.has_begun:
                    self.has_begun = True
                    await self._send(
                        {"type": "http.response.start", "status": 200, "headers": list(_HEADERS)}
                    )
                await self._send(message)
                self._last_write = asyncio.get_running_loop().time()
        except TimeoutError:
            raise Disconnected from None  # so that a client that does not read holds no resources
