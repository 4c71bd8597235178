"""Distributes the engine core's outputs to their requests, and makes the users' RequestOutputs.

This is the frontend's only loop over requests. `answer.py` processes the tokens.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxllm.errors import ValidationError
from jaxllm.frontend.answer import Answer, OpenRequest
from jaxllm.frontend.input_processor import ProcessedInput
from jaxllm.frontend.pooled import PooledRequest
from jaxllm.frontend.tokenizer import Tokenizer
from jaxllm.messages import EngineOutput
from jaxllm.metrics.finished_request import FinishedRequest
from jaxllm.outputs import AnyOutput
from jaxllm.pooler_config import Pooling
from jaxllm.sampling_params import RequestOutputKind


class ProcessedOutputs(NamedTuple):
    """The results of one batch of engine outputs."""

    request_outputs: list[AnyOutput]
    abort_ids: list[str]  # engine requests that a stop string ended: the engine must abort them


class OutputProcessor:
    """All unfinished requests of one frontend. A request with n > 1 is n requests of the engine;
    their outputs are merged here under the user's id."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        pooling: Pooling | None = None,
        on_end: Callable[[FinishedRequest], None] = lambda request: None,
    ):
        """`pooling` is how the engine pools, if it does; `on_end` is called with every finished
        request."""
        self._detokenizer = None if tokenizer is None else tokenizer.detokenizer
        self._pooling = pooling
        self._on_end = on_end
        self._requests: dict[str, OpenRequest | PooledRequest] = {}
        self._answers: dict[
            str, Answer | PooledRequest
        ] = {}  # by the engine's request id; unfinished only

    def is_known(self, request_id: str) -> bool:
        """Whether an unfinished request has this id."""
        return request_id in self._requests

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def add_request(
        self,
        processed: ProcessedInput,
        on_finish: Callable[[Any], None] | None = None,
    ) -> None:
        """Add a request, or refuse a duplicate id and change nothing. Its last output also goes to
        `on_finish`."""
        request_id = processed.request_id
        engine_ids = [request.request_id for request in processed.requests]
        if request_id in self._requests or any(id in self._answers for id in engine_ids):
            raise ValidationError(
                f"request_id={request_id!r} is already in use by an unfinished request",
                parameter="request_id",
                value=request_id,
            )
        if self._pooling is None:
            request = OpenRequest(processed, self._detokenizer, on_finish)
        else:
            request = PooledRequest(processed, self._pooling, on_finish)
        self._requests[request_id] = request
        self._answers.update(zip(engine_ids, request.answers, strict=True))

    def process(self, outputs: list[EngineOutput]) -> ProcessedOutputs:
        """Process the outputs of a step. Drop the outputs of requests that have ended."""
        now = time.time()
        abort_ids: list[str] = []
        touched: dict[str, OpenRequest | PooledRequest] = {}
        for out in outputs:
            answer: Any = self._answers.get(out.request_id)
            if answer is None:
                continue
            request = answer.request
            num_new = answer.take(out)
            request.account(answer, out, num_new, now)
            if answer.finish_reason is not None:
                del self._answers[out.request_id]
                request.num_running -= 1
                if out.finish_reason is None:
                    abort_ids.append(out.request_id)
            if answer.has_news:
                touched[request.request_id] = request
        request_outputs = []
        for request in touched.values():
            if request.is_finished:
                del self._requests[request.request_id]
                request_outputs.append(request.finish())
                self._on_end(request.finished())
            elif request.kind is not RequestOutputKind.FINAL_ONLY:
                request_outputs.append(request.make_output())
        return ProcessedOutputs(request_outputs, abort_ids)

    def abort(self, request_id: str) -> list[str]:
        """Forget a request, and return the ids of its engine requests that still run; an empty list
        for an unknown or finished id. Only `on_finish` gets its last output."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        running: list[Any] = [answer for answer in request.answers if answer.finish_reason is None]
        for answer in running:
            del self._answers[answer.engine_id]
            answer.abort()
        request.num_running = 0
        request.finish()
        self._on_end(request.finished())
        return [answer.engine_id for answer in running]
