"""X-Request-Id: the name of a request, of its client's choice or ours, in every answer to it."""

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.openai.fields import is_request_id

HEADER = "X-Request-Id"


class RequestIds:
    """Gives every request an id, and tells it in the head of the answer."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        # One that cannot be used is replaced; the answer tells by which.
        request_id = given if is_request_id(given) else uuid.uuid4().hex
        scope["request_id"] = request_id

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, tell)


def request_id_of(scope: Scope) -> str:
    """The id that a request was given."""
    return scope["request_id"]
