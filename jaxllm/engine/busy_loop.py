"""The engine's own loop: take messages in, run a step, send its outputs.

The loop uses no socket, and decodes only commands: queues connect it to the I/O threads, so no
client can slow it down. It sleeps while there is nothing to do, and wakes at once when a message
arrives. While the device runs a step, the loop plans the next one as late as it can, so that more
requests can join it.
"""

import contextlib
import queue
from typing import Any, NamedTuple

import msgspec

from jaxllm.engine.commands import Command, decode
from jaxllm.engine.launch import Engine
from jaxllm.engine.pace import LOOK_S
from jaxllm.errors import EngineDeadError, JaxLLMError
from jaxllm.logging import init_logger
from jaxllm.messages import (
    Abort,
    Add,
    Call,
    CallFailed,
    EngineOutput,
    EngineRequest,
    Failure,
    FinishReason,
    Hello,
    Ready,
    Returned,
    Stop,
    ToEngine,
)
from jaxllm.watch import Work

logger = init_logger(__name__)

# How often the loop checks that an engine without work lives.
_CHECK_S = 1.0


class Letter(NamedTuple):
    """A message, and the frontend that sent it or is to get it."""

    client: bytes
    message: Any


EVERYBODY = b""  # every frontend

Inbox = queue.SimpleQueue[Letter]
# The sending thread sorts the outputs of a step by frontend. None ends the thread.
Outbox = queue.SimpleQueue[Letter | list[EngineOutput] | None]


class BusyLoop:
    """Drives one engine until a frontend stops it."""

    def __init__(self, engine: Engine, inbox: Inbox, outbox: Outbox):
        self._engine = engine
        self._inbox = inbox
        self._outbox = outbox
        self._num_turns = 0
        self._long_command: Command[Any, Any] | None = None  # that runs now

    def at_work(self) -> list[Work]:
        """The work that should make progress: the loop, and the steps of each replica that has
        any, since replicas do not wait for each other. Any thread may call this."""
        if (command := self._long_command) is not None:
            return [Work(type(command).__name__, self._num_turns, takes_long=True)]
        steps = [
            Work(f"the step of replica {replica}", count)
            for replica, count in enumerate(self._engine.progress())
            if count is not None
        ]
        return [*steps, Work("its loop", self._num_turns)]

    def run(self) -> None:
        """Run until a frontend stops the engine; raise when the engine is dead."""
        while self._take_in():
            if self._engine.has_work():
                outputs = self._engine.step()
                if outputs:
                    self._outbox.put(outputs)

    def _take_in(self) -> bool:
        """Handle messages until it is time for a step. Return False on a Stop."""
        with contextlib.suppress(queue.Empty):
            while True:
                letter = self._next()
                if isinstance(letter.message, Stop):
                    return False
                self._do(letter.client, letter.message)
        return True

    def _next(self) -> Letter:
        """Return the next message; raise queue.Empty when it is time for a step."""
        self._num_turns += 1
        while not self._engine.has_work():
            self._num_turns += 1
            # The engine may have died in its last step, or while it was idle.
            self._engine.check()
            with contextlib.suppress(queue.Empty):
                return self._inbox.get(timeout=_CHECK_S)
        while (spare_s := self._engine.spare_s) > 0:
            self._num_turns += 1
            with contextlib.suppress(queue.Empty):
                return self._inbox.get(timeout=min(spare_s, LOOK_S))
        return self._inbox.get_nowait()

    def _do(self, client: bytes, message: ToEngine) -> None:
        if isinstance(message, Add):
            for request in message.requests():
                self._add(request)
        elif isinstance(message, Abort):
            self._engine.abort_requests(message.request_ids)
        elif isinstance(message, Call):
            self._outbox.put(Letter(client, self._call(message)))
        elif isinstance(message, Hello):
            self._outbox.put(Letter(client, Ready(self._engine.info, self._engine.startup)))

    def _add(self, request: EngineRequest) -> None:
        try:
            self._engine.add_request(request)
        except EngineDeadError:
            raise
        except JaxLLMError as error:
            self._outbox.put([_refusal(request.request_id, str(error))])

    def _call(self, call: Call) -> Returned | CallFailed:
        """Run a command. If it fails, or if its answer cannot be encoded, only the frontend that
        sent it gets the error."""
        try:
            command = decode(call.command)
            self._long_command = command if command.takes_long else None
            answer = msgspec.msgpack.encode(self._engine.call(command))
            return Returned(call.number, msgspec.Raw(answer))
        except EngineDeadError:
            raise
        except Exception as error:
            if not isinstance(error, JaxLLMError):
                logger.exception("a command failed")
            return CallFailed(call.number, failure_of(error))
        finally:
            self._long_command = None


def failure_of(error: Exception) -> Failure:
    """Turn an error into a message."""
    return Failure(f"{error}"[:2000] or repr(error), type(error).__name__)


def _refusal(request_id: str, reason: str) -> EngineOutput:
    return EngineOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=reason)
