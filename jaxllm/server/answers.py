"""Answers requests for text, whole or as a stream: chats, completions, messages. Everything except
the bodies is the same for all paths."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxllm.errors import ValidationError
from jaxllm.frontend.async_llm_engine import AsyncLLMEngine
from jaxllm.frontend.input_processor import ProcessedInput
from jaxllm.media.chat import has_media
from jaxllm.openai.answer import TIMEOUT
from jaxllm.openai.endpoints import Background, Endpoint, Request
from jaxllm.openai.errors import UnavailableError
from jaxllm.openai.served_model import ServedModel
from jaxllm.outputs import RequestOutput
from jaxllm.prompts import PromptType
from jaxllm.sampling_params import BeamSearchParams, SamplingParams
from jaxllm.server.beams import beam_ids, fitting, search
from jaxllm.server.body import decode_json, read_body
from jaxllm.server.disconnect import while_connected
from jaxllm.server.errors import Disconnected, body_of, error_response, json_response, respond
from jaxllm.server.limits import check_logprobs
from jaxllm.server.merged import merged
from jaxllm.server.request_id import request_id_of
from jaxllm.server.service import Service
from jaxllm.server.sse import EventStream
from jaxllm.server.trace_headers import trace_headers

# The event loop decodes bodies up to this size, because a thread would cost more.
_SMALL_BODY = 32 << 10
# The interval of aborting a request after its time is over: it may not be in the engine yet.
_TELL_AGAIN_S = 0.5


class _Job(NamedTuple):
    """A request after it was read, with everything except its prompts."""

    id: str  # unique in the engine
    name: str  # the id that the client knows
    created: int
    deadline: float | None  # on the clock of the event loop
    request: Request
    served: ServedModel  # as the request names it
    params: SamplingParams
    beams: BeamSearchParams | None  # of a search, in place of samples
    trace_headers: dict[str, str] | None  # of the parent span, if tracing is on

    @property
    def num_answers(self) -> int:
        of_prompt = self.params.n if self.beams is None else self.beams.beam_width
        return self.request.num_prompts * of_prompt

    @property
    def names(self) -> tuple[str, str]:
        """What a client may call it: by the header of its answer, and by the id in its body."""
        return self.name, self.request.id_of(self.name)


class _Arrival(NamedTuple):
    """The facts about a request before its body is read."""

    at: float  # on the clock of the event loop
    name: str
    trace_headers: dict[str, str] | None


class AnswerEndpoint:
    """The endpoint of one path, as an ASGI application."""

    def __init__(self, endpoint: Endpoint, service: Service):
        self._endpoint = endpoint
        self._service = service
        self._engine = service.engine
        self._is_traced = service.engine.tracer is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival = _Arrival(
            at=asyncio.get_running_loop().time(),
            name=request_id_of(scope),
            trace_headers=trace_headers(scope) if self._is_traced else None,
        )
        wire = self._endpoint.wire
        events = EventStream(send, self._service.options.client_timeout, wire)
        try:
            await self._service.check_takes_requests()
            with self._service.admission.body() as admit:
                body = await read_body(scope, receive, self._service.body_limits, admit)
                answer = self._answer(body, arrival, events)
                response = await while_connected(receive, answer)
        except Disconnected:
            return
        except Exception as error:
            response = error_response(error, wire)
        if response is not None:
            await respond(response, scope, receive, send, self._service.options.client_timeout)

    async def _answer(self, body: bytes, arrival: _Arrival, events: EventStream) -> Response | None:
        """Return the whole answer, or None if it was streamed."""
        size = len(body)
        job = await self._service.with_adapter(partial(self._job, body, arrival))
        try:
            return await self._answer_to(job, size, events)
        except ValidationError as error:
            raise job.request.in_its_words(error) from error

    async def _answer_to(self, job: _Job, size: int, events: EventStream) -> Response | None:
        if job.request.is_background:
            return await self._begin(job, size)
        async with self._admitted(job, size) as inputs:
            if not job.request.stream:
                return json_response(await self._whole(job, inputs))
            await self._stream(job, inputs, events)
            return None

    @contextlib.asynccontextmanager
    async def _admitted(self, job: _Job, size: int) -> AsyncGenerator[list[ProcessedInput], None]:
        """Prepare the prompts, and count the request as under way within this context."""
        service = self._service
        with service.admission.answers(job.num_answers):
            inputs = await self._inputs(job, size)
            lengths = [len(one.prompt_token_ids) for one in inputs]
            most, shown = service.options.max_request_logprobs, job.request.num_prompt_copies
            check_logprobs(job.params, lengths, self._engine.info, most, num_shown=shown)
            with service.admission.tokens(sum(lengths)):
                yield inputs

    async def _begin(self, job: _Job, size: int) -> Response:
        """Begin an answer for which the client does not wait."""
        background = self._endpoint.background
        assert background is not None, "this endpoint reads no such requests"
        stack = contextlib.AsyncExitStack()
        inputs = await stack.enter_async_context(self._admitted(job, size))
        body = background.begin(job.request, job.created, job.served)
        task = asyncio.create_task(self._go_on(background, job, inputs, stack))
        self._service.background.add(task)
        task.add_done_callback(self._service.background.discard)
        return json_response(body)

    async def _go_on(
        self,
        background: Background,
        job: _Job,
        inputs: Sequence[ProcessedInput],
        stack: contextlib.AsyncExitStack,
    ) -> None:
        """Make an answer in the background. The stack is what counts it as under way."""
        async with stack:
            try:
                await self._whole(job, inputs)
            except asyncio.CancelledError:
                error = UnavailableError("the server is stopping")
                background.fail(job.request, job.created, job.served, body_of(error))
                raise
            except Exception as error:
                background.fail(job.request, job.created, job.served, body_of(error))

    async def _inputs(self, job: _Job, size: int) -> list[ProcessedInput]:
        """Validate and tokenize all prompts, off the event loop."""
        service, request = self._service, job.request
        has_form = job.params.structured_outputs is not None
        if not has_form and not _shows_images(request):
            process = partial(self._process, job)
            return await service.in_text_thread(request.conversation, process, size)
        read = partial(request.prompts, job.served)
        prompts = await service.in_text_thread(request.conversation, read, size)
        prompts = await self._engine.images.loaded(prompts)
        process = partial(self._process, job, prompts)
        return await self._engine.in_tokenizer_thread(process, size, has_form=has_form)

    async def _job(self, body: bytes, arrival: _Arrival) -> _Job:
        read = partial(self._read, body, arrival)
        if len(body) <= _SMALL_BODY:
            return read()
        return await self._engine.in_tokenizer_thread(read, len(body))

    def _read(self, body: bytes, arrival: _Arrival) -> _Job:
        options, served = self._service.options, self._service.served
        value = decode_json(body, options.max_json_depth)
        request = self._endpoint.request.read(value, live=True)
        served = served.named(request.model)
        params = request.sampling_params(served)
        return _Job(
            id=uuid.uuid4().hex,
            name=arrival.name,
            created=int(time.time()),
            deadline=None
            if options.request_timeout is None
            else arrival.at + options.request_timeout,
            request=request,
            served=served,
            params=params,
            beams=request.beam_search(params, served),
            trace_headers=arrival.trace_headers,
        )

    def _process(self, job: _Job, prompts: list[PromptType] | None = None) -> list[ProcessedInput]:
        """Validate and tokenize all prompts, because the limit of tokens applies before the request
        may wait."""
        request, truncate = job.request, job.request.truncate_prompt_tokens
        options = None if truncate is None else {"truncate_prompt_tokens": truncate}
        inputs = []
        if prompts is None:
            prompts = request.prompts(job.served)
        for place, prompt in enumerate(prompts):
            try:
                one = self._engine.process_input(
                    f"{job.id}-{place}",
                    prompt,
                    job.params,
                    priority=request.priority or 0,
                    tokenization_kwargs=options,
                    trace_headers=job.trace_headers,
                    reasoning=request.reasoning(job.served),
                    lora_request=job.served.lora_request,
                )
                if job.beams is not None:
                    fitting(job.beams, one, self._engine.info)  # refuses
            except ValidationError as error:
                raise request.in_its_words(error, place) from error
            inputs.append(one)
        return inputs

    async def _whole(self, job: _Job, inputs: Sequence[ProcessedInput]) -> object:
        last: dict[int, RequestOutput] = {}
        async with contextlib.aclosing(self._outputs(job, inputs)) as outputs:
            async for place, output in outputs:
                last[place] = output
        in_order = [last[place] for place in range(len(inputs))]
        return self._endpoint.answer(job.request, job.name, job.created, in_order, job.served)

    async def _stream(
        self, job: _Job, inputs: Sequence[ProcessedInput], events: EventStream
    ) -> None:
        chunks = self._endpoint.stream(job.request, job.name, job.created, job.served)
        try:
            async with (
                events.kept_alive(self._service.options.sse_keep_alive_interval),
                contextlib.aclosing(self._outputs(job, inputs)) as outputs,
            ):
                async for place, output in outputs:
                    await events.write(chunks.take(place, output))
            await events.write(chunks.end())
        except Disconnected:
            raise
        except Exception as error:
            if not events.has_begun:
                raise
            await events.write(chunks.fail(body_of(error)))
        await events.end()

    async def _outputs(
        self, job: _Job, inputs: Sequence[ProcessedInput]
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield the engine's outputs with the index of their prompt; abort the rest on close."""
        ids = [one.request_id for one in inputs]
        streams = [self._engine.submit(one) for one in inputs]
        if job.beams is not None:
            ids = [id for one in inputs for id in beam_ids(one.request_id, job.beams)]
            streams = [self._search(job, job.beams, one) for one in inputs]
        service = self._service
        service.under_way.update(dict.fromkeys(ids, job.names))
        alarm = _Alarm(self._engine, ids, job.deadline)
        try:
            async with contextlib.aclosing(merged(streams)) as outputs:
                async for place, output in outputs:
                    for one in output.outputs:
                        if one.finish_reason == "abort":
                            if service.is_stopping:
                                raise UnavailableError("the server is stopping")
                            if alarm.has_rung:
                                one.stop_reason = TIMEOUT
                    yield place, output
        finally:
            alarm.cancel()
            for one in ids:
                del service.under_way[one]

    def _search(
        self, job: _Job, params: BeamSearchParams, prompt: ProcessedInput
    ) -> AsyncGenerator[RequestOutput, None]:
        fits = fitting(params, prompt, self._engine.info)
        return search(self._engine, prompt, fits, job.request.priority or 0)


def _shows_images(request: Request) -> bool:
    chat = request.conversation
    return chat is not None and has_media(chat.messages)


class _Alarm:
    """Aborts requests when their time is over."""

    def __init__(self, engine: AsyncLLMEngine, request_ids: list[str], deadline: float | None):
        self.has_rung = False
        self._task: asyncio.Task[None] | None = None
        if deadline is not None:
            self._task = asyncio.create_task(self._ring(engine, request_ids, deadline))

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _ring(self, engine: AsyncLLMEngine, request_ids: list[str], deadline: float) -> None:
        await asyncio.sleep(deadline - asyncio.get_running_loop().time())
        self.has_rung = True
        while True:
            await engine.abort(request_ids)
            await asyncio.sleep(_TELL_AGAIN_S)
