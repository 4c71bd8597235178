"""The engine's own loop: take in what has come, step, hand on what it brought.

It touches no socket, and no bytes but those of commands: queues lead to the threads that do, so no
client can change its pace. It sleeps while there is nothing to do, and wakes at once when something
comes. While the device has a step to run it plans the next one as late as it can: more may come for
it.
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

# How often an engine without work is asked whether it lives.
_CHECK_S = 1.0


class Letter(NamedTuple):
    """A message and the frontend that it is from, or for."""

    client: bytes
    message: Any


EVERYBODY = b""  # every frontend

Inbox = queue.SimpleQueue[Letter]
# Outputs of a step go as they are, and are sorted by frontend where they are sent. None: no more.
Outbox = queue.SimpleQueue[Letter | list[EngineOutput] | None]


class BusyLoop:
    """Drives one engine until it is told to stop."""

    def __init__(self, engine: Engine, inbox: Inbox, outbox: Outbox):
        self._engine = engine
        self._inbox = inbox
        self._outbox = outbox
        self._num_turns = 0
        self._long_command: Command[Any, Any] | None = None  # that is being obeyed

    def at_work(self) -> list[Work]:
        """What should get on: the loop itself, and the steps of each replica that has any, which
        does not have to wait for the others. May be asked from any thread."""
        if (command := self._long_command) is not None:
            return [Work(type(command).__name__, self._num_turns, takes_long=True)]
        steps = [
            Work(f"the step of replica {replica}", count)
            for replica, count in enumerate(self._engine.progress())
            if count is not None
        ]
        return [*steps, Work("its loop", self._num_turns)]

    def run(self) -> None:
        """Returns when stopped; raises when there is no engine any more."""
        while self._take_in():
            if self._engine.has_work():
                outputs = self._engine.step()
                if outputs:
                    self._outbox.put(outputs)

    def _take_in(self) -> bool:
        """Do all that is asked, for as long as there is nothing else to do."""
        with contextlib.suppress(queue.Empty):
            while True:
                letter = self._next()
                if isinstance(letter.message, Stop):
                    return False
                self._do(letter.client, letter.message)
        return True

    def _next(self) -> Letter:
        """Raises queue.Empty when it is time for a step."""
        self._num_turns += 1
        while not self._engine.has_work():
            self._num_turns += 1
            # It may have died in its last step, or while it had nothing to do.
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
        """Obey a command. One that fails, or whose answer cannot be sent, is the concern of the
        frontend that asked, and of nobody else."""
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
    """An error as a message."""
    return Failure(f"{error}"[:2000] or repr(error), type(error).__name__)


def _refusal(request_id: str, reason: str) -> EngineOutput:
    return EngineOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=reason)
