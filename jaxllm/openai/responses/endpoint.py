"""The endpoint of responses, with a store or without one."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxllm.errors import refused
from jaxllm.openai.endpoints import Background, Endpoint
from jaxllm.openai.errors import ErrorBody
from jaxllm.openai.fields import read_fields
from jaxllm.openai.responses.request import ResponsesBody, ResponsesRequest
from jaxllm.openai.responses.response import Response, begun, failed
from jaxllm.openai.responses.store import ResponseStore
from jaxllm.openai.responses.stream import ResponseStream, answer_response
from jaxllm.openai.served_model import ServedModel
from jaxllm.openai.wire import OPENAI

WIRE = OPENAI._replace(names_events=True, last=b"")
_OPTION = "start the server with --response-store"


def responses_endpoint(store: ResponseStore | None, *, why: str = _OPTION) -> Endpoint:
    """The endpoint of a server with this store. `why` says what to do, or why there is none."""
    stored = _Stored(store, why)
    return Endpoint(
        stored,
        partial(answer_response, keep=stored.keep),
        partial(ResponseStream, keep=stored.keep),
        WIRE,
        Background(stored.begin, stored.fail),
    )


@dataclass(frozen=True)
class _Stored:
    """Reads requests, and keeps their responses."""

    store: ResponseStore | None
    why: str

    def read(self, body: object, *, live: bool = False) -> ResponsesRequest:
        fields = read_fields(body, ResponsesBody)
        if fields.background:
            if self.store is None or fields.store is False:
                remedy = self.why if self.store is None else "leave out store"
                raise refused("background", True, f"it is read where it is stored; {remedy}")
            if fields.stream:
                raise refused("stream", True, "a background response is read by its id")
        if self.store is None:
            if fields.store:
                raise refused("store", True, f"nothing is stored here; {self.why}")
            if fields.previous_response_id is not None:
                given = fields.previous_response_id
                raise refused("previous_response_id", given, f"nothing is stored here; {self.why}")
            fields.store = False
            return ResponsesRequest.after([], fields, live=live)
        fields.store = fields.store is not False
        before: list[Any] = []
        if fields.previous_response_id is not None:
            found = self.store.get(fields.previous_response_id, "previous_response_id")
            if found.is_in_progress:
                given = fields.previous_response_id
                raise refused("previous_response_id", given, "it is in progress; wait for its end")
            before = [*found.before, *found.output]
        return ResponsesRequest.after(before, fields, live=live)

    def keep(self, request: ResponsesRequest, response: Response) -> None:
        if self.store is None or not request.body.store:
            return
        if request.is_background:
            self.store.end(request.id, response)
        else:
            self.store.put(request.id, response, request.items)

    def begin(self, request: ResponsesRequest, created: int, served: ServedModel) -> Response:
        """Store a response that has only begun, and return it."""
        assert self.store is not None, "refused when it was read"
        response = begun(request, created, served)
        self.store.put(request.id, response, request.items)
        return response

    def fail(
        self, request: ResponsesRequest, created: int, served: ServedModel, error: ErrorBody
    ) -> None:
        """Store why there will be no answer."""
        assert self.store is not None, "refused when it was read"
        self.store.end(request.id, failed(begun(request, created, served), error))
