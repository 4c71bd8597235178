"""Protects a server that trusts everybody who can reach it from web pages of other sites.

A page's own name may resolve to this machine (DNS rebinding). The browser then treats the server as
part of the page's site, but `Host` shows the name that it used. A browser also sends some requests
to other sites without asking them first; `Origin` shows that a page sent them.
"""

import ipaddress
import socket
from collections.abc import Collection
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.server.errors import HTTPError, error_response

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class Names(Protocol):
    """The options of a server that say how it is called, and by whom."""

    @property
    def host(self) -> str: ...

    @property
    def allowed_hosts(self) -> Collection[str]: ...

    @property
    def allowed_origins(self) -> Collection[str]: ...


class KnownHosts:
    """A middleware that refuses requests with an unknown host name and, if the server needs no key,
    requests from pages of other sites."""

    def __init__(self, app: ASGIApp, options: Names, is_open: bool, any_host: Collection[str]):
        """Paths of `any_host` may be requested by any host name. They reveal nothing, and health
        probes often know no right name."""
        self._app = app
        self._any_host = any_host
        self._names = {_plain(name) for name in options.allowed_hosts}
        if not self._names and not is_loopback(options.host):
            self._names = {"*"}
        self._knows_local = not options.allowed_hosts
        self._own = _plain(options.host)
        self._origins = set(options.allowed_origins)
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None if scope["type"] == "lifespan" else self._objection(scope)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error)(scope, receive, send)

    def _objection(self, scope: Scope) -> HTTPError | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        # Browsers always send a Host header.
        if hosts and scope["path"] not in self._any_host:
            if len(hosts) > 1 or not self._is_known(_name_of(hosts[0])):
                return _forbidden(
                    f"Host {', '.join(hosts)!r:.80} is not a name of this server; --allowed-hosts "
                    "says which are"
                )
        if self._is_open and scope["method"] not in _SAFE_METHODS:
            for origin in headers.getlist("origin"):
                if not self._is_own_page(origin, hosts):
                    return _forbidden(
                        f"pages of {origin!r:.80} may not use this server; --allowed-origins says "
                        "which may"
                    )
        return None

    def _is_known(self, name: str) -> bool:
        if "*" in self._names or name in self._names:
            return True
        if self._knows_local and (name == self._own or _is_local(name)):
            return True
        parents = [name[at:] for at, character in enumerate(name) if character == "."]
        return any(f"*{parent}" in self._names for parent in parents)

    def _is_own_page(self, origin: str, hosts: list[str]) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        authority = origin.partition("://")[2].lower()
        return authority != "" and [authority] == [host.lower() for host in hosts]


def is_loopback(host: str) -> bool:
    """Whether a server at this host can be reached only from its own machine."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(_is_loopback_address(str(one[4][0]).partition("%")[0]) for one in found)


def _is_local(name: str) -> bool:
    """Whether a name means the local machine on every machine."""
    return name == "localhost" or name.endswith(".localhost") or _is_loopback_address(name)


def _is_loopback_address(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False


def _name_of(host: str) -> str:
    """The name in a Host header, without its port."""
    if host.startswith("["):
        return _plain(host.partition("]")[0])
    return _plain(host.rpartition(":")[0] if ":" in host else host)


def _plain(name: str) -> str:
    return name.strip().strip("[]").rstrip(".").lower()


def _forbidden(message: str) -> HTTPError:
    return HTTPError(403, "PermissionDeniedError", message)
