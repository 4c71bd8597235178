"""What there is to say of an endpoint: how it is served, who may ask, and what for."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxllm.openai.schema import Schema
from jaxllm.server.service import Service

Handler = Callable[[Service, Request], Awaitable[Response]]


class Access(Enum):
    """Who may ask."""

    ANYBODY = "anybody, by whatever host name: it tells a status and nothing else"
    WITHOUT_KEY = "whoever knows a right host name"
    KEY = "users, who have a key if there are keys"
    ADMIN = "operators, who have an admin key if there are admin keys, and else as users"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path, and what its methods do, which is the same."""

    path: str
    serve: Callable[[Service], Any]  # gives what a starlette Route takes
    summary: str
    methods: tuple[str, ...] = ("GET",)
    access: Access = Access.KEY
    # Whether requests are counted and logged: not those of programs that ask again and again.
    is_counted: bool = True
    # As it is described for programs.
    body: tuple[type, ...] = ()  # of a request, as JSON: one of these
    answer: type | Schema | None = None  # with status 200, as JSON
    chunk: type | None = None  # of an answer that is streamed
    content_type: str | None = None  # of an answer that is no JSON
    errors: tuple[int, ...] = ()
    query: tuple[tuple[str, Schema], ...] = ()  # parameters in the URL, which may be left out

    def route(self, service: Service) -> Route:
        return Route(self.path, self.serve(service), methods=self.methods)


def by(handler: Handler) -> Callable[[Service], Any]:
    """Served by a function of the service and a request."""
    return lambda service: partial(handler, service)
