"""A port for a process that is about to start."""

import contextlib
import random
import socket

# Below those that Linux gives to connections by itself. So no connection of another test gets the
# port in the seconds that a process may need until it listens.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    while True:
        port = random.SystemRandom().choice(_PORTS)  # another worker draws another one
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
