"""Which keys may connect to a socket of ZeroMQ's encrypted kind."""


class OneKey:
    """Lets clients in that have this key."""

    def __init__(self, key: bytes):
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key
