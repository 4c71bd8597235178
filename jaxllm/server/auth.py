"""API keys: every path wants one, but those that say whether the server is well, and the
page, which asks for it. What an operator does has keys of its own."""

import hashlib
import hmac
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.errors import ValidationError, not_utf8
from jaxllm.server.errors import HTTPError, error_response
from jaxllm.server.options import ServerOptions, check_key
from jaxllm.server.page.routes import PAGE_PATHS

OPEN_PATHS = frozenset({"/health", "/ping", "/ready"}) | PAGE_PATHS


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of a server. Without keys of a kind, nobody is asked for one."""

    api: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()


class Authentication:
    """Lets requests through that bring one of the keys as `Authorization: Bearer KEY`, and those
    to open paths."""

    def __init__(
        self, app: ASGIApp, keys: Collection[str], open_paths: Collection[str] = OPEN_PATHS
    ):
        self._app = app
        self._open_paths = open_paths
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in self._open_paths or self._knows(scope):
            await self._app(scope, receive, send)
        else:
            await _refusal()(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
        digest = _digest(key.strip())
        # All of them are compared: how long it takes tells nothing of which one is near.
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal():
    message = "an API key is needed, as 'Authorization: Bearer KEY', and a right one"
    return error_response(
        HTTPError(401, "AuthenticationError", message, {"WWW-Authenticate": "Bearer"})
    )


def read_keys(options: ServerOptions) -> Keys:
    """The keys of the flags and of the files."""
    return Keys(
        api=_all_keys("api_key_file", options.api_key, options.api_key_file),
        admin=_all_keys("admin_api_key_file", options.admin_api_key, options.admin_api_key_file),
    )


def _all_keys(name: str, of_flags: Sequence[str], path: str | None) -> tuple[str, ...]:
    if path is None:
        return tuple(of_flags)
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from None
    of_file = [line.strip() for line in lines if line.strip()]
    if not of_file:
        # A server without a key would be open to everybody.
        raise ValidationError(f"{name}={path!r}: it has no keys")
    for key in of_file:
        check_key(name, key)
    return (*of_flags, *of_file)
