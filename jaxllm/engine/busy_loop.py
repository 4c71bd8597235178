"""The engine's own loop: take in what has come, step, hand on what it brought.

It touches no socket and no bytes: queues lead to the threads that do, so no client can change its
pace. It sleeps while there is nothing to do, and wakes at once when something comes.
"""

import contextlib
import queue
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxllm.engine.launch import Engine
from jaxllm.errors import EngineDeadError, JaxLLMError
from jaxllm.logging import init_logger
from jaxllm.messages import (
    Abort,
    Add,
    Call,
    EngineOutput,
    FinishReason,
    Hello,
    Ready,
    Returned,
    Stop,
    ToEngine,
)

logger = init_logger(__name__)


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
        self._calls: dict[str, Callable[..., Any]] = {
            "replica_stats": engine.replica_stats,
            "memory": engine.memory,
            "reset_prefix_cache": engine.reset_prefix_cache,
            "start_profile": _start_profile,
            "stop_profile": _stop_profile,
        }

    def run(self) -> None:
        """Returns when stopped; raises when there is no engine any more."""
        while self._take_in():
            if self._engine.has_work():
                outputs = self._engine.step()
                if outputs:
                    self._outbox.put(outputs)

    def _take_in(self) -> bool:
        """Do all that is asked, waiting for something if there is nothing else to do."""
        with contextlib.suppress(queue.Empty):
            while True:
                letter = self._inbox.get(block=not self._engine.has_work())
                if isinstance(letter.message, Stop):
                    return False
                self._do(letter.client, letter.message)
        return True

    def _do(self, client: bytes, message: ToEngine) -> None:
        if isinstance(message, Add):
            try:
                self._engine.add_request(message.request)
            except EngineDeadError:
                raise
            except JaxLLMError as error:
                self._outbox.put([_refusal(message.request.request_id, str(error))])
        elif isinstance(message, Abort):
            self._engine.abort_requests(message.request_ids)
        elif isinstance(message, Call):
            self._outbox.put(Letter(client, self._call(message)))
        elif isinstance(message, Hello):
            self._outbox.put(Letter(client, Ready(self._engine.info, self._engine.startup)))

    def _call(self, call: Call) -> Returned:
        try:
            return Returned(call.number, self._calls[call.name](**call.arguments))
        except Exception as error:  # whatever it is, it is for the caller
            logger.warning("call %r: %s", call.name, error)
            return Returned(call.number, error=f"{type(error).__name__}: {error}"[:500])


def _refusal(request_id: str, reason: str) -> EngineOutput:
    return EngineOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=reason)


def _start_profile(directory: str) -> None:
    import jax

    jax.profiler.start_trace(directory)


def _stop_profile() -> None:
    import jax

    jax.profiler.stop_trace()
