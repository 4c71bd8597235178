"""Answers requests to an engine that pools. Everything except the bodies is the same for all
paths."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxllm.errors import ValidationError
from jaxllm.frontend.input_processor import ProcessedInput
from jaxllm.openai.errors import AnswerError, UnavailableError
from jaxllm.openai.pooling.fields import PoolingRequest, Work
from jaxllm.outputs import PoolingRequestOutput
from jaxllm.server.body import decode_json, read_body
from jaxllm.server.disconnect import while_connected
from jaxllm.server.errors import Disconnected, error_response, json_response, respond
from jaxllm.server.merged import merged
from jaxllm.server.request_id import request_id_of
from jaxllm.server.service import Service
from jaxllm.server.trace_headers import trace_headers


class _Arrival(NamedTuple):
    """The facts about a request before its body is read."""

    name: str  # the id that the client knows
    trace_headers: dict[str, str] | None


class PoolingEndpoint:
    """The endpoint of one path, as an ASGI application."""

    def __init__(self, kind: type[PoolingRequest], service: Service):
        self._kind = kind
        self._service = service
        self._engine = service.engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        is_traced = self._engine.tracer is not None
        arrival = _Arrival(request_id_of(scope), trace_headers(scope) if is_traced else None)
        try:
            await service.check_takes_requests()
            with service.admission.body() as admit:
                body = await read_body(scope, receive, service.body_limits, admit)
                response = await while_connected(receive, self._answer(body, arrival))
        except Disconnected:
            return
        except Exception as error:
            response = error_response(error)
        if response is not None:
            await respond(response, scope, receive, send, service.options.client_timeout)

    async def _answer(self, body: bytes, arrival: _Arrival) -> Response:
        service, size = self._service, len(body)
        read = partial(self._engine.in_tokenizer_thread, partial(self._read, body), size)
        request = await service.with_adapter(read)
        names = tuple(filter(None, (arrival.name, request.request_id)))
        try:
            with service.admission.answers(request.num_prompts):
                prepare = partial(self._prepare, request, arrival)
                work, inputs = await service.in_text_thread(request.conversation, prepare, size)
                with service.admission.tokens(sum(len(one.prompt_token_ids) for one in inputs)):
                    outputs = await self._outputs(inputs, names)
        except ValidationError as error:
            raise request.in_its_words(error) from error
        answer = partial(work.answer, arrival.name, int(time.time()), outputs)
        # Long lists of numbers take long to write.
        respond = lambda: json_response(answer())  # noqa: E731
        return await self._engine.in_tokenizer_thread(respond, size)

    def _read(self, body: bytes) -> PoolingRequest:
        value = decode_json(body, self._service.options.max_json_depth)
        request = self._kind.read(value)
        self._service.served.check_name(request.model)
        return request

    def _prepare(
        self, request: PoolingRequest, arrival: _Arrival
    ) -> tuple[Work, list[ProcessedInput]]:
        """Validate and tokenize all prompts."""
        served = self._service.served.named(request.model)
        work = request.work(served)
        base, inputs = uuid.uuid4().hex, []
        for place, prompt in enumerate(work.prompts):
            try:
                one = self._engine.pooling_input.process(
                    f"{base}-{place}",
                    prompt,
                    work.params,
                    task=work.task,
                    priority=request.priority or 0,
                    options=work.options,
                    trace_headers=arrival.trace_headers,
                    lora_request=served.lora_request,
                )
            except ValidationError as error:
                raise request.in_its_words(error, place) from error
            inputs.append(one)
        return work, inputs

    async def _outputs(
        self, inputs: Sequence[ProcessedInput], names: tuple[str, ...]
    ) -> list[PoolingRequestOutput[Any]]:
        """The engine's output for each prompt. Those that are not read are aborted. `names` are the
        ids of the request that its client knows."""
        service, timeout = self._service, self._service.options.request_timeout
        ids = [one.request_id for one in inputs]
        found: dict[int, PoolingRequestOutput[Any]] = {}
        service.under_way.update(dict.fromkeys(ids, names))
        try:
            async with (
                asyncio.timeout(timeout),
                contextlib.aclosing(merged([self._engine.submit(one) for one in inputs])) as its,
            ):
                async for place, output in its:
                    if output.outputs is None and service.is_stopping:
                        raise UnavailableError("the server is stopping")
                    found[place] = output
        except TimeoutError:
            raise AnswerError(f"the request took longer than {timeout} seconds") from None
        finally:
            for one in ids:
                del service.under_way[one]
        return [found[place] for place in range(len(inputs))]
