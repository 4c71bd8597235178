"""An engine that neither this process nor a child of it runs, for example replicas in a cluster.

`AsyncLLMEngine` takes one in place of an engine's process. What it does with text stays here, so an
engine has to take requests as tokens only, and to give tokens back.
"""

import itertools
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from jaxllm.engine.commands import Answer, Command
from jaxllm.messages import OWNER_MARK, EngineInfo, EngineRequest, FromEngine, ToEngine
from jaxllm.metrics.startup import Phase


class Owner:
    """Gives the requests of one prompt ids that are never reused: outputs in flight for an aborted
    request must not reach a later request with the user's same id."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()

    def own(self, requests: Iterable[EngineRequest]) -> None:
        serial = next(self._numbers)
        for request in requests:
            request.request_id = self._id(serial, request.request_id)
            if request.prefix_leader_id is not None:
                request.prefix_leader_id = self._id(serial, request.prefix_leader_id)

    def _id(self, serial: int, request_id: str) -> str:
        return f"{self.name}{OWNER_MARK}{serial}{OWNER_MARK}{request_id}"


class FarEngine(ABC):
    """All is used on one event loop."""

    info: EngineInfo
    startup: list[Phase]
    status: int | None = None  # its end is not ours

    @abstractmethod
    def own(self, requests: list[EngineRequest]) -> None:
        """Give the requests of one prompt ids that are never reused."""

    @abstractmethod
    def send(self, message: ToEngine) -> None:
        """Send a message. This never waits."""

    @abstractmethod
    def listen(self) -> None:
        """Start to bring messages to the running event loop."""

    @abstractmethod
    async def receive(self) -> FromEngine:
        """Return the next message that is not an answer to a call."""

    @abstractmethod
    async def call(self, command: Command[Any, Answer]) -> Answer:
        """Have the engine run a command."""

    @abstractmethod
    def fail_calls(self, error: BaseException) -> None:
        """End the calls that wait."""

    @abstractmethod
    def close(self) -> None: ...
