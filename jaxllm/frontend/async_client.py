"""The connection from an event loop to an engine in another process."""

import asyncio
import itertools
import threading
from typing import Any

import msgspec
import zmq

from jaxllm import errors
from jaxllm.engine.commands import Answer, Command, decode_answer, encode
from jaxllm.errors import EngineDeadError
from jaxllm.frontend.engine_process import EngineProcess, JoinedEngine
from jaxllm.frontend.far_engine import FarEngine, Owner
from jaxllm.logging import init_logger
from jaxllm.messages import (
    Beat,
    Call,
    CallFailed,
    Dead,
    EngineInfo,
    EngineRequest,
    Failure,
    Follows,
    FromEngine,
    Hello,
    Ready,
    Returned,
    ToEngine,
)
from jaxllm.watch import PATIENCE, Silence

logger = init_logger(__name__)

AnyEngine = EngineProcess | JoinedEngine | FarEngine

# How long the end of the engine's process may stay unnoticed.
_LOOK_MS = 200


class AsyncClient:
    """One frontend's connection. The constructor waits until the engine is ready. `listen` then
    binds the connection to the running event loop."""

    def __init__(self, process: EngineProcess | JoinedEngine):
        self._process = process
        self._owner = Owner()
        self._name = self._owner.name.encode()
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._input = self._connect(process.assignment.input_address)
        self._output = self._connect(process.assignment.output_address)
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Returned | CallFailed]] = {}
        self._receiver: threading.Thread | None = None
        self._closing = threading.Event()
        limit_s = process.assignment.config.liveness.engine_heartbeat_timeout
        self._silence = Silence(limit_s * PATIENCE)  # the engine loads and compiles first
        try:
            self._output.send(b"")
            self.send(Hello())
            ready = self._await_ready()
            self.info: EngineInfo = ready.info
            self.startup = ready.startup
            self._silence = Silence(limit_s)
        except BaseException:
            self.close()
            raise

    def send(self, message: ToEngine) -> None:
        """Send a message. This never waits, since the engine always reads."""
        self._input.send(self._encoder.encode(message), zmq.NOBLOCK)

    def own(self, requests: list[EngineRequest]) -> None:
        """Give the requests of one prompt ids that are never reused."""
        self._owner.own(requests)

    def listen(self) -> None:
        """Start to bring messages to the running event loop."""
        loop = asyncio.get_running_loop()
        self._incoming: asyncio.Queue[FromEngine | BaseException] = asyncio.Queue()
        self._receiver = threading.Thread(
            target=self._receive, args=(loop,), name="receive", daemon=True
        )
        self._receiver.start()

    async def receive(self) -> FromEngine:
        """Return the next message that is not an answer to a call; raise EngineDeadError when no
        more will come."""
        while True:
            message = await self._incoming.get()
            if isinstance(message, BaseException):
                raise message
            if isinstance(message, Dead):
                raise _error_of(message.failure, EngineDeadError)
            if not isinstance(message, Returned | CallFailed):
                return message
            future = self._calls.pop(message.number, None)
            if future is not None and not future.done():
                future.set_result(message)

    async def call(self, command: Command[Any, Answer]) -> Answer:
        """Have the engine run a command. Another task must call `receive` to read the answer."""
        number = next(self._numbers)
        call = Call(number, encode(command))
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        self.send(call)
        message = await future
        if isinstance(message, CallFailed):
            raise _error_of(message.failure, errors.JaxLLMError)
        return decode_answer(command, message.answer)

    def fail_calls(self, error: BaseException) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()

    def close(self) -> None:
        self._closing.set()
        if self._receiver is not None:
            self._receiver.join()
        self._input.close(linger=1000)
        self._output.close(linger=0)
        self._context.term()

    def _connect(self, address: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._name)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(address)
        return socket

    def _receive(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread that reads and decodes messages, and notices the end of the process."""
        while not self._closing.is_set():
            message = self._next()
            if message is not None:
                try:
                    loop.call_soon_threadsafe(self._incoming.put_nowait, message)
                except RuntimeError:
                    return  # the loop has ended
            if isinstance(message, BaseException):
                return

    def _next(self) -> FromEngine | BaseException | None:
        """Wait a short time for a message or for the end of the engine; None if neither came."""
        has_ended = self._process.status is not None  # before the poll: a last message may be here
        if self._output.poll(_LOOK_MS):
            self._silence.heard()
            message = self._decoder.decode(self._output.recv())
            return None if isinstance(message, Beat) else message
        if has_ended:
            return self._death()
        return self._hang() if self._silence.is_too_long() else None

    def _await_ready(self) -> Ready:
        message = None
        while message is None or isinstance(message, Follows):
            message = self._next()
            if isinstance(message, Follows):
                self._process.follows = True
        if isinstance(message, BaseException):
            raise message
        if isinstance(message, Dead):
            raise _error_of(message.failure, EngineDeadError)
        assert isinstance(message, Ready), message
        return message

    def _death(self) -> BaseException:
        status = self._process.status
        if status == 0:
            # On a host that only follows this is the normal end.
            return SystemExit(0)
        return EngineDeadError(f"the engine process has ended with status {status}: see its log")

    def _hang(self) -> EngineDeadError:
        silence = self._silence
        error = EngineDeadError(
            f"the engine process hangs: it has given no sign of life for {silence.seconds:.0f} s "
            f"(engine_heartbeat_timeout allows {silence.limit_s:g})"
        )
        logger.error("%s", error)
        self._process.give_up()
        return error


def connect(engine: AnyEngine) -> AsyncClient | FarEngine:
    """Wait until an engine is ready, and return the connection."""
    return engine if isinstance(engine, FarEngine) else AsyncClient(engine)


def _error_of(failure: Failure, otherwise: type[errors.JaxLLMError]) -> errors.JaxLLMError:
    """Turn a failure into an error of its kind, or of `otherwise` if we have no such kind."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.JaxLLMError):
        return kind(failure.reason)
    return otherwise(f"{failure.kind}: {failure.reason}")
