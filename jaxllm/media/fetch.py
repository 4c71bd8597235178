"""Fetches a file from a host that the operator has allowed.

One parser reads the URL, and what it has read is what is connected to: the addresses of the host
are checked, and the connection goes to the checked address, so that a name cannot turn to another
one in between. A redirect is a new URL, and is checked as the first one was.
"""

import http.client
import ipaddress
import socket
import ssl
import time
import urllib.parse
from collections.abc import Collection
from typing import NamedTuple

from jaxllm.media.resizing import UndecodableError

# The most bytes of an image file and of a video file, and the time to fetch one.
MAX_BYTES = 32 << 20
MAX_VIDEO_BYTES = 128 << 20
_TIMEOUT_S = 10.0
_MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_PART = 1 << 16
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")


class _Target(NamedTuple):
    """What a URL names."""

    is_secure: bool
    host: str
    port: int
    path: str


def fetch(
    url: str, domains: Collection[str], timeout_s: float = _TIMEOUT_S, *, most: int = MAX_BYTES
) -> bytes:
    """Return the bytes that a URL names; raise UndecodableError. The time is for an image; where
    more bytes are allowed, so is more time."""
    deadline = time.monotonic() + timeout_s * max(1.0, most / MAX_BYTES)
    for _ in range(_MAX_REDIRECTS + 1):
        target = _parse(url, domains)
        found, moved = _get(target, deadline, most)
        if moved is None:
            return found
        url = urllib.parse.urljoin(url, moved)
    raise UndecodableError(f"it is redirected more than {_MAX_REDIRECTS} times")


def _parse(url: str, domains: Collection[str]) -> _Target:
    if not url.isascii() or not url.isprintable() or set(url) & set(' \\"<>^`{|}'):
        raise UndecodableError("the URL has characters that URLs have not")
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        raise UndecodableError("it is not a URL") from None
    if parts.scheme not in ("http", "https") or not host:
        raise UndecodableError("the URL must begin with http:// or https://, and name a host")
    if "@" in parts.netloc:
        raise UndecodableError("the URL must not name a user")
    if host not in domains:
        raise UndecodableError(
            "its host is not allowed; the operator allows hosts by --allowed-media-domains"
        )
    is_secure = parts.scheme == "https"
    path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
    return _Target(is_secure, host, port or (443 if is_secure else 80), path)


def _get(target: _Target, deadline: float, most: int) -> tuple[bytes, str | None]:
    """Return the body, or the place where it is instead."""
    connection = _Connection(target, _address(target), deadline)
    try:
        connection.request("GET", target.path, headers={"Accept-Encoding": "identity"})
        answer = connection.getresponse()
        if answer.status in _REDIRECTS:
            return b"", answer.getheader("Location") or ""
        if answer.status != 200:
            raise UndecodableError(f"its host answers with status {answer.status}")
        if (answer.getheader("Content-Encoding") or "identity").lower() != "identity":
            raise UndecodableError("its host sends it compressed, which was not asked for")
        return _read(answer, connection, deadline, most), None
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, UndecodableError):
            raise
        raise UndecodableError("its host does not answer as it should, or not in time") from None
    finally:
        connection.close()


def _read(
    answer: http.client.HTTPResponse, connection: "_Connection", deadline: float, most: int
) -> bytes:
    length = answer.getheader("Content-Length") or "0"
    if length.isdigit() and len(length) < 20 and int(length) > most:
        raise UndecodableError(too_long(most))
    parts, size = [], 0
    while True:
        connection.wait_until(deadline)
        part = answer.read1(_PART)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
        if size > most:
            raise UndecodableError(too_long(most))


def _address(target: _Target) -> str:
    """An address of the host; none of them may be private, unless the operator has named it."""
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UndecodableError("its host is not found") from None
    addresses = [str(one[4][0]) for one in found]
    if not addresses or not all(one == target.host or _is_public(one) for one in addresses):
        raise UndecodableError("its host has an address inside a private network")
    return addresses[0]


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip.sixtofour or ip.teredo or ip in _TRANSLATED:
            return False  # they lead to addresses of the older kind, which may be private
    return ip.is_global and not ip.is_multicast


class _Connection(http.client.HTTPConnection):
    """A connection to an address that was checked, by the name of the host."""

    def __init__(self, target: _Target, address: str, deadline: float):
        super().__init__(target.host, target.port)
        self._target, self._address, self._deadline = target, address, deadline

    def connect(self) -> None:
        left = self._left(self._deadline)
        self.sock = socket.create_connection((self._address, self._target.port), timeout=left)
        self.wait_until(self._deadline)
        if self._target.is_secure:
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=self._target.host)

    def wait_until(self, deadline: float) -> None:
        """Let the next operation wait no longer."""
        left = self._left(deadline)
        if self.sock is not None:
            self.sock.settimeout(left)

    @staticmethod
    def _left(deadline: float) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def too_long(most: int) -> str:
    """Why a file is refused that is longer than this."""
    return f"the file is longer than {most} bytes, the most that it may have"
