"""API keys: checks them against the access that the table of endpoints declares."""

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.errors import ValidationError
from jaxllm.files import read_given_text
from jaxllm.openai.wire import OPENAI, Wire
from jaxllm.server.endpoint import Access, Endpoint
from jaxllm.server.errors import HTTPError, error_response
from jaxllm.server.options import ServerOptions, check_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of a server. If there are none of a kind, that kind is not required."""

    api: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()

    def for_access(self, access: Access) -> tuple[str, ...]:
        """The keys that open an endpoint; none if it needs no key."""
        if access in (Access.ANYBODY, Access.WITHOUT_KEY):
            return ()
        return self.admin if access is Access.ADMIN and self.admin else self.api


class Authentication:
    """A middleware that requires one of the path's keys, as `Authorization: Bearer KEY` or as
    `X-Api-Key: KEY`, which clients of Anthropic's protocol send. A path that does not exist needs a
    user's key, too, so that only users learn which paths exist."""

    def __init__(self, app: ASGIApp, keys: Keys, endpoints: Iterable[Endpoint]):
        self._app = app
        endpoints = list(endpoints)
        self._accesses = {one.path: one.access for one in endpoints}
        self._wires = {one.path: one.wire for one in endpoints}
        self._digests = {
            access: [_digest(key.encode()) for key in keys.for_access(access)] for access in Access
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._admits(scope):
            await self._app(scope, receive, send)
        else:
            await _refusal(self._wires.get(scope["path"], OPENAI))(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        digests = self._digests[self._accesses.get(scope["path"], Access.KEY)]
        scope["owner"] = ""
        if not digests:
            return True
        # Compare with all keys, so that the time does not reveal a near match.
        found = False
        for given in map(_digest, _given_keys(scope["headers"])):
            for known in digests:
                if hmac.compare_digest(known, given):
                    found, scope["owner"] = True, known.hex()
        return found


def owner_of(scope: Scope) -> str:
    """Whom a request's files and batches belong to: a digest of its key; empty without keys."""
    return scope["owner"]


def _given_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """The keys of a request. A header that comes twice says nothing."""
    found = []
    bearers = [value for name, value in headers if name == b"authorization"]
    scheme, _, key = (bearers[0] if len(bearers) == 1 else b"").partition(b" ")
    if scheme.lower() == b"bearer":
        found.append(key.strip())
    plain = [value for name, value in headers if name == b"x-api-key"]
    return [*found, *(key.strip() for key in plain if len(plain) == 1)]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal(wire: Wire) -> Response:
    message = "an API key is needed, as 'Authorization: Bearer KEY', and a right one"
    return error_response(
        HTTPError(401, "AuthenticationError", message, {"WWW-Authenticate": "Bearer"}), wire
    )


def read_keys(options: ServerOptions) -> Keys:
    """Read the keys from the flags and from the files."""
    return Keys(
        api=_all_keys("api_key_file", options.api_key, options.api_key_file),
        admin=_all_keys("admin_api_key_file", options.admin_api_key, options.admin_api_key_file),
    )


def _all_keys(name: str, of_flags: Sequence[str], path: str | None) -> tuple[str, ...]:
    if path is None:
        return tuple(of_flags)
    of_file = [line.strip() for line in read_given_text(path).splitlines() if line.strip()]
    if not of_file:
        # Refuse, because a server without a key would be open to everybody.
        raise ValidationError(f"{name}={path!r}: it has no keys")
    for key in of_file:
        check_key(name, key)
    return (*of_flags, *of_file)
