"""A further frontend in its own process: `python -m jaxllm.server.frontend_process`, started by the
first frontend.

Standard input is a socket to the first frontend. It carries the assignment and then orders. When it
closes, the first frontend has ended, and this process ends, too. The first frontend decides when to
stop, so this process ignores signals that reach the whole process group.
"""

import dataclasses
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator

import msgspec

from jaxllm.config import EngineConfig
from jaxllm.errors import JaxLLMError
from jaxllm.frontend.async_llm_engine import AsyncLLMEngine
from jaxllm.frontend.engine_process import JoinedEngine
from jaxllm.logging import init_logger, name_process
from jaxllm.server.frontends import READY, EngineEnded, FrontendAssignment, ToFrontend
from jaxllm.server.peers import Peers
from jaxllm.server.run import EXIT_ENGINE_DEAD, Server, make_server

logger = init_logger(__name__)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    lines = _lines(channel)
    first = next(lines, None)
    if first is None:
        return EXIT_ENGINE_DEAD  # the first frontend has ended
    assignment = msgspec.json.decode(first, type=FrontendAssignment)
    name_process(f"frontend {assignment.index}")
    sys.path[:] = assignment.engine.python_path
    joined = JoinedEngine(assignment.engine)
    orders = _Orders(lines, joined)
    orders.start()
    try:
        engine = AsyncLLMEngine(_config_of(assignment), joined)
    except JaxLLMError as error:
        logger.error("%s", error)
        return EXIT_ENGINE_DEAD
    options = assignment.options
    peers = Peers(assignment.engine.directory, assignment.index, options.api_server_count)
    server = make_server(engine, options, assignment.keys, assignment.chat_template, peers)
    orders.server = server
    channel.sendall(READY)
    server.run([socket.socket(fileno=assignment.listener)])
    engine.shutdown()
    return EXIT_ENGINE_DEAD if engine.errored else 0


class _Orders(threading.Thread):
    """Carries out the orders of the first frontend, and ends with it."""

    def __init__(self, lines: Iterator[bytes], engine: JoinedEngine):
        super().__init__(name="orders", daemon=True)
        self._lines = lines
        self._engine = engine
        self.server: Server | None = None  # set before the first order arrives

    def run(self) -> None:
        try:
            for line in self._lines:
                order = msgspec.json.decode(line, type=ToFrontend)
                if isinstance(order, EngineEnded):
                    self._engine.status = order.status
                else:
                    assert self.server is not None
                    self.server.should_exit = True
        finally:
            os._exit(EXIT_ENGINE_DEAD)


def _lines(channel: socket.socket) -> Iterator[bytes]:
    """Yield the lines of a socket. A file object is no option: the reading thread would hold its
    lock while the process ends."""
    rest = b""
    while part := channel.recv(1 << 16):
        *lines, rest = (rest + part).split(b"\n")
        yield from lines


def _config_of(assignment: FrontendAssignment) -> EngineConfig:
    """The engine's config with another default seed. With the same one, every frontend would give
    the same answer to a question without a seed."""
    config = assignment.engine.config
    model = dataclasses.replace(config.model, seed=config.model.seed + assignment.index)
    return dataclasses.replace(config, model=model)


if __name__ == "__main__":
    sys.exit(main())
