"""The endpoint of responses, with a store or without one."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxllm.errors import refused
from jaxllm.openai.endpoints import Endpoint
from jaxllm.openai.fields import read_fields
from jaxllm.openai.responses.request import ResponsesBody, ResponsesRequest
from jaxllm.openai.responses.response import Response
from jaxllm.openai.responses.store import ResponseStore
from jaxllm.openai.responses.stream import ResponseStream, answer_response
from jaxllm.openai.wire import OPENAI

WIRE = OPENAI._replace(names_events=True, last=b"")
_OPTION = "start the server with --response-store"


def responses_endpoint(store: ResponseStore | None) -> Endpoint:
    """The endpoint of a server with this store."""
    stored = _Stored(store)
    return Endpoint(
        stored,
        partial(answer_response, keep=stored.keep),
        partial(ResponseStream, keep=stored.keep),
        WIRE,
    )


@dataclass(frozen=True)
class _Stored:
    """Reads requests, and keeps their responses."""

    store: ResponseStore | None

    def read(self, body: object, *, live: bool = False) -> ResponsesRequest:
        fields = read_fields(body, ResponsesBody)
        if self.store is None:
            if fields.store:
                raise refused("store", True, f"nothing is stored here; {_OPTION}")
            if fields.previous_response_id is not None:
                given = fields.previous_response_id
                raise refused("previous_response_id", given, f"nothing is stored here; {_OPTION}")
            fields.store = False
            return ResponsesRequest.after([], fields, live=live)
        fields.store = fields.store is not False
        before: list[Any] = []
        if fields.previous_response_id is not None:
            found = self.store.get(fields.previous_response_id, "previous_response_id")
            before = [*found.before, *found.output]
        return ResponsesRequest.after(before, fields, live=live)

    def keep(self, request: ResponsesRequest, response: Response) -> None:
        if self.store is not None and request.body.store:
            self.store.put(request.id, response, request.items)
