"""What follows from the secret that some engines share: their keys, and a mark of their addresses.

All traffic between them is encrypted, and each side knows by its keys that the other one has the
secret. An address comes to an engine in a client's request. The mark shows that one of these
engines has given it out, so no client can make an engine call elsewhere.
"""

import hashlib
import hmac
from typing import NamedTuple

import zmq
from zmq.utils import z85

from jaxllm.handover.source import BlockSource


class KeyPair(NamedTuple):
    public: bytes
    secret: bytes


def key_of_givers(secret: bytes) -> KeyPair:
    """The keys of the side that gives blocks."""
    return _pair(secret, b"gives")


def key_of_takers(secret: bytes) -> KeyPair:
    return _pair(secret, b"takes")


def mark(secret: bytes, source: BlockSource) -> str:
    """A mark that only those with the secret can make for an address."""
    return _derived(secret, b"address\0" + str(source).encode()).hex()


def is_marked(secret: bytes, source: BlockSource, given: str) -> bool:
    return hmac.compare_digest(mark(secret, source).encode(), given.encode("utf-8", "replace"))


def _pair(secret: bytes, side: bytes) -> KeyPair:
    key = z85.encode(_derived(secret, side))
    return KeyPair(zmq.curve_public(key), key)


def _derived(secret: bytes, what: bytes) -> bytes:
    return hmac.new(secret, b"jaxllm KV blocks\0" + what, hashlib.sha256).digest()
