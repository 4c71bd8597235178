"""The declaration of an endpoint: how it is served, who may use it, and its description."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxllm.openai.schema import Schema
from jaxllm.openai.wire import OPENAI, Wire
from jaxllm.server.service import Service

Handler = Callable[[Service, Request], Awaitable[Response]]


class Access(Enum):
    """Who may use an endpoint."""

    ANYBODY = "anybody, by whatever host name: it tells a status and nothing else"
    WITHOUT_KEY = "whoever knows a right host name"
    KEY = "users, who have a key if there are keys"
    ADMIN = "operators, who have an admin key if there are admin keys, and else as users"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path. All of its methods do the same."""

    path: str
    serve: Callable[[Service], Any]  # returns an endpoint for a starlette Route
    summary: str
    methods: tuple[str, ...] = ("GET",)
    access: Access = Access.KEY
    # Whether requests are counted and logged. Health probes and scrapes are not.
    is_counted: bool = True
    # The description in /openapi.json.
    form: Schema | None = None  # the body of a request, as multipart/form-data
    body: tuple[type, ...] = ()  # the JSON body of a request is one of these
    answer: type | Schema | None = None  # the JSON body of an answer with status 200
    chunk: Any = None  # of a streamed answer: a type, or a union of several
    content_type: str | None = None  # of an answer that is not JSON
    errors: tuple[int, ...] = ()
    query: tuple[tuple[str, Schema], ...] = ()  # optional parameters in the URL
    wire: Wire = OPENAI  # the shape of its errors

    def route(self, service: Service) -> Route:
        return Route(self.path, self.serve(service), methods=self.methods)


def by(handler: Handler) -> Callable[[Service], Any]:
    """Serve with a function of the service and a request."""
    return lambda service: partial(handler, service)
