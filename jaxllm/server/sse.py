"""Server-sent events: an answer as it comes, one `data:` line for each piece."""

import asyncio
from collections.abc import Sequence

import msgspec
from starlette.types import Message, Send

from jaxllm.server.errors import Disconnected

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not gather what is to be seen at once
]
_DONE = b"data: [DONE]\n\n"


class EventStream:
    """Writes events to a client. It begins with the first one: until then the answer may still
    become an error with a status of its own."""

    def __init__(self, send: Send, timeout_s: float):
        self._send = send
        self._timeout_s = timeout_s
        self._encoder = msgspec.json.Encoder()
        self.has_begun = False

    async def write(self, events: Sequence[object]) -> None:
        if events:
            data = b"".join(b"data: %b\n\n" % self._encoder.encode(event) for event in events)
            await self._write(data, more=True)

    async def end(self) -> None:
        await self._write(_DONE, more=False)

    async def _write(self, data: bytes, *, more: bool) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": list(_HEADERS)}
            )
        message: Message = {"type": "http.response.body", "body": data, "more_body": more}
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            raise Disconnected from None  # a client that reads nothing holds what it holds no more
