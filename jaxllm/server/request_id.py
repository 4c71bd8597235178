"""X-Request-Id: the id of a request, chosen by its client or by us, in every answer."""

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.openai.fields import is_request_id

HEADER = "X-Request-Id"


class RequestIds:
    """Gives every request an id and puts it into the head of the answer."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        # Replace an invalid id; the answer's header shows the new one.
        request_id = given if is_request_id(given) else uuid.uuid4().hex
        scope["request_id"] = request_id

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, tell)


def request_id_of(scope: Scope) -> str:
    """The id of a request."""
    return scope["request_id"]
