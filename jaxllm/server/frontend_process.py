"""A further frontend in a process of its own: `python -m jaxllm.server.frontend_process`, started
by the first one.

Standard input is a socket to it. It brings the assignment and then what there is to do; its end
means that the first one is gone, however that came about, and this process with it. Ends are the
first one's to decide, so signals that reach the whole group are ignored.
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
        return EXIT_ENGINE_DEAD  # nobody has waited for this process
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
    """Does what the first frontend says, and ends with it."""

    def __init__(self, lines: Iterator[bytes], engine: JoinedEngine):
        super().__init__(name="orders", daemon=True)
        self._lines = lines
        self._engine = engine
        self.server: Server | None = None  # there is one before any order comes

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
    """Not those of a file object: its lock, held by a thread that reads, would be in the way when
    the process ends."""
    rest = b""
    while part := channel.recv(1 << 16):
        *lines, rest = (rest + part).split(b"\n")
        yield from lines


def _config_of(assignment: FrontendAssignment) -> EngineConfig:
    """The engine's, with another seed for requests that bring none: with the same one a question
    would get the same answer from every frontend."""
    config = assignment.engine.config
    model = dataclasses.replace(config.model, seed=config.model.seed + assignment.index)
    return dataclasses.replace(config, model=model)


if __name__ == "__main__":
    sys.exit(main())
