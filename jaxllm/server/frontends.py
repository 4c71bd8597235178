"""Further frontends of a server, each in its own process (`--api-server-count`).

The first frontend owns the engine and the others. It binds one listening socket, which the others
inherit. All accept on it, so a free frontend takes the next connection, and the end of one loses no
waiting connection. They stop together: if a frontend dies, the server ends as if the engine had
died, but the other frontends finish their requests first.
"""

import socket
import subprocess
import sys
import time

import msgspec

from jaxllm.errors import EngineDeadError, JaxLLMError
from jaxllm.frontend.async_llm_engine import AsyncLLMEngine
from jaxllm.frontend.engine_process import kill
from jaxllm.messages import Assignment
from jaxllm.server.auth import Keys
from jaxllm.server.options import ServerOptions

# A frontend sends this when it is about to serve.
READY = b"ready\n"
_LOOK_S = 0.2


class FrontendAssignment(msgspec.Struct, kw_only=True):
    """The input of a frontend's process. Its command line does not contain the keys."""

    index: int
    engine: Assignment
    options: ServerOptions
    keys: Keys
    chat_template: str | None
    listener: int  # file descriptor of the listening socket


class EngineEnded(msgspec.Struct, tag=True):
    """The engine has ended."""

    status: int


class StopServing(msgspec.Struct, tag=True):
    """Accept no more requests, and end when those under way have ended."""


ToFrontend = EngineEnded | StopServing


class FrontendProcess:
    """One further frontend. Its standard input is a socket that carries orders. When either side
    ends, the socket closes and the other side sees it."""

    def __init__(self, assignment: FrontendAssignment):
        self.index = assignment.index
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jaxllm.server.frontend_process"],
                stdin=theirs.fileno(),
                pass_fds=[assignment.listener],
            )
        self.tell(assignment)

    @property
    def status(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll()

    def tell(self, message: FrontendAssignment | ToFrontend) -> None:
        try:
            self._channel.sendall(msgspec.json.encode(message) + b"\n")
        except OSError:
            pass  # it has ended already; `status` reports that

    def await_ready(self, engine: AsyncLLMEngine) -> None:
        """Wait until it can serve; raise if it or the engine has ended."""
        self._channel.settimeout(_LOOK_S)
        said = b""
        while said != READY:
            if engine.exit_status is not None:
                raise EngineDeadError(f"the engine has ended with status {engine.exit_status}")
            try:
                part = self._channel.recv(len(READY))
            except TimeoutError:
                continue
            except OSError:
                part = b""  # it ended without reading its orders
            if not part:
                raise JaxLLMError(
                    f"frontend {self.index} has ended with status {self._process.wait()} before it "
                    "was ready: see its log"
                )
            said += part
        self._channel.settimeout(None)

    def kill(self) -> None:
        kill(self._process)
        self._channel.close()


class Frontends:
    """The further frontends of a server, if any."""

    def __init__(self) -> None:
        self._processes: list[FrontendProcess] = []
        self._may_end = False
        self._must_end_at = 0.0
        self.has_lost = False

    def start(
        self,
        engine: Assignment,
        options: ServerOptions,
        keys: Keys,
        chat_template: str | None,
        listener: socket.socket,
    ) -> None:
        """Start all frontends after the first. Call this within the context, because a signal may
        arrive between two starts."""
        for index in range(1, options.api_server_count):
            self._processes.append(
                FrontendProcess(
                    FrontendAssignment(
                        index=index,
                        engine=engine,
                        options=options,
                        keys=keys,
                        chat_template=chat_template,
                        listener=listener.fileno(),
                    )
                )
            )

    def await_ready(self, engine: AsyncLLMEngine) -> None:
        for process in self._processes:
            process.await_ready(engine)

    def lost(self) -> FrontendProcess | None:
        """Return a frontend that has ended without an order to."""
        if not self._may_end:
            for process in self._processes:
                if process.status is not None:
                    self.has_lost = True
                    return process
        return None

    def engine_has_ended(self, status: int) -> None:
        """Tell the frontends; they end after they have told their clients."""
        self._may_end = True
        self._tell(EngineEnded(status))

    def stop(self, within_s: float) -> None:
        """Let the frontends finish their requests."""
        self._may_end = True
        self._must_end_at = time.monotonic() + within_s
        self._tell(StopServing())

    @property
    def are_stopping(self) -> bool:
        """Whether some have not finished and have time left."""
        has_time = time.monotonic() < self._must_end_at
        return has_time and any(process.status is None for process in self._processes)

    def __enter__(self) -> "Frontends":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()

    def _tell(self, message: ToFrontend) -> None:
        for process in self._processes:
            process.tell(message)
