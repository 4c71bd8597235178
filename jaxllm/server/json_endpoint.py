"""An endpoint with a JSON body and a JSON answer, computed in the tokenizer's thread."""

from collections.abc import Callable
from functools import partial

from starlette.types import Receive, Scope, Send

from jaxllm.openai.wire import OPENAI, Wire
from jaxllm.server.body import decode_json, read_body
from jaxllm.server.disconnect import while_connected
from jaxllm.server.errors import Disconnected, error_response, json_response, respond
from jaxllm.server.service import Service


class JSONEndpoint:
    """One path, as an ASGI application."""

    def __init__(
        self, answer: Callable[[Service, object], object], service: Service, wire: Wire = OPENAI
    ):
        self._service = service
        self._wire = wire
        self._answer_to = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        try:
            await service.check_takes_requests()
            with service.admission.body() as admit:
                body = await read_body(scope, receive, service.body_limits, admit)
                decode = partial(decode_json, body, service.options.max_json_depth)
                value = await service.engine.in_tokenizer_thread(decode, len(body))
                answer = partial(self._answer, value, len(body))
                found = await while_connected(receive, service.with_adapter(answer))
                response = json_response(found)
        except Disconnected:
            return
        except Exception as error:
            response = error_response(error, self._wire)
        await respond(response, scope, receive, send, service.options.client_timeout)

    async def _answer(self, value: object, size: int) -> object:
        """The answer to a body of so many bytes."""
        answer = partial(self._answer_to, self._service, value)
        return await self._service.in_text_thread(value, answer, size)
