"""API keys: every path wants one, but those that say whether the server is well, and the
page, which asks for it."""

import hashlib
import hmac
from collections.abc import Collection
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.errors import ValidationError
from jaxllm.server.errors import HTTPError, error_response
from jaxllm.server.options import ServerOptions, check_key
from jaxllm.server.page.routes import PAGE_PATHS

OPEN_PATHS = frozenset({"/health", "/ping", "/ready"}) | PAGE_PATHS


class Authentication:
    """Lets requests through that bring one of the keys as `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: Collection[str]):
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or self._knows(scope):
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


def read_keys(options: ServerOptions) -> tuple[str, ...]:
    """The keys of the flags and of the file."""
    keys = list(options.api_key)
    if options.api_key_file is not None:
        lines = Path(options.api_key_file).read_text().splitlines()
        of_file = [line.strip() for line in lines if line.strip()]
        if not of_file:
            # A server without a key would be open to everybody.
            raise ValidationError(f"api_key_file={options.api_key_file!r}: it has no keys")
        for key in of_file:
            check_key("api_key_file", key)
        keys += of_file
    return tuple(keys)
