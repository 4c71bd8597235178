"""The engines of all replicas as one engine, in a frontend."""

import asyncio
import contextvars
import functools
from collections.abc import Coroutine
from typing import Any, NamedTuple

import msgspec
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from jaxllm.engine import commands
from jaxllm.engine.commands import Answer, Command
from jaxllm.errors import EngineDeadError
from jaxllm.frontend.far_engine import FarEngine, Owner
from jaxllm.logging import init_logger
from jaxllm.messages import (
    Abort,
    Add,
    EngineOutput,
    EngineRequest,
    FinishReason,
    FromEngine,
    Outputs,
    Ready,
    ToEngine,
)
from jaxllm.server.ray.work import Work

logger = init_logger(__name__)

# How long a command waits for replicas, some of which may be about to end, and how old an earlier
# answer may be that is returned in its place.
_CALL_S = 30.0
# How long the caller waits if there is an earlier answer, and an abort until the next one may go.
_PATIENCE_S = 2.0
# How often replicas are told of an abort while one of them fails to answer.
_MAX_ABORTS = 3


class Fleet(FarEngine):
    """Sends each prompt to one replica, in a task of its own.

    If the replica is lost, or says no, before anything of the answer has been passed on, another
    one gets the prompt. Later the answer ends with the reason: nobody gets two beginnings.
    """

    def __init__(self, engines: Any, ready: Ready, max_attempts: int):
        """`engines` is the handle of the replicas' deployment."""
        self.info, self.startup = ready.info, ready.startup
        self._engines = engines
        self._answer = engines.options(method_name="answer", stream=True)
        self._max_attempts = max_attempts
        self._owner = Owner()
        self._decoder = msgspec.msgpack.Decoder(Outputs)
        self._incoming: asyncio.Queue[FromEngine | BaseException] = asyncio.Queue()
        self._prompts: dict[str, _Prompt] = {}  # by the ids of their unfinished requests
        # By command: the calls under way, and the latest answers.
        self._asked: dict[bytes, asyncio.Task[Any]] = {}
        self._known: dict[bytes, _Known] = {}
        self._to_abort: list[_ToAbort] = []
        self._aborting: asyncio.Task[None] | None = None

    def own(self, requests: list[EngineRequest]) -> None:
        self._owner.own(requests)

    def send(self, message: ToEngine) -> None:
        if isinstance(message, Add):
            prompt = _Prompt(Work(message))
            self._prompts.update(dict.fromkeys(prompt.unfinished, prompt))
            prompt.task = _start(self._serve(prompt))
            prompt.task.add_done_callback(self._check)
        elif isinstance(message, Abort):
            self._abort(message.request_ids)

    def listen(self) -> None:
        pass  # the tasks of prompts bring messages

    async def receive(self) -> FromEngine:
        message = await self._incoming.get()
        if isinstance(message, BaseException):
            raise message
        return message

    async def call(self, command: Command[Any, Answer]) -> Answer:
        """Have the engines of all replicas run a command. Those that are lost have no answer. If
        one is slow, return the latest answer of all to this command, if there is a recent one."""
        command.unite([])  # refuses what is for one engine, before any engine does it
        data = bytes(commands.encode(command))
        asked = self._asked.get(data)
        if asked is None:
            asked = self._asked[data] = _start(self._ask(command, data))
            asked.add_done_callback(functools.partial(self._note_answer, data))
        known = self._known.get(data)
        if known is not None and _now() - known.at < _CALL_S:
            await asyncio.wait((asked,), timeout=_PATIENCE_S)
            if not asked.done():
                logger.warning("a replica is slow: these are the figures of before")
                return known.answer
        await asyncio.wait((asked,))
        return asked.result()

    def _note_answer(self, data: bytes, asked: "asyncio.Task[Any]") -> None:
        del self._asked[data]
        if not asked.cancelled() and asked.exception() is None:
            self._known[data] = _Known(asked.result(), _now())

    async def _ask(self, command: Command[Any, Answer], data: bytes) -> Answer:
        answers = []
        for one in await self._tell("call", data, within_s=_CALL_S):
            if isinstance(one, bytes):
                answers.append(commands.decode_answer(command, msgspec.Raw(one)))
            else:
                logger.warning("a replica does not answer: %s", _first_line(one))
        if not answers:
            raise EngineDeadError("no replica answers")
        return command.unite(answers)

    async def _tell(self, method: str, what: Any, *, within_s: float) -> list[Any]:
        """Call a method of all replicas. Prompts leave room for this in each of them."""
        response = self._engines.broadcast(method, what)
        try:
            return await response.results_async(timeout_s=within_s, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            raise EngineDeadError(f"no replica answers: {_first_line(error)}") from error

    def fail_calls(self, error: BaseException) -> None:
        pass  # each has a time limit

    def close(self) -> None:
        for prompt in set(self._prompts.values()):
            assert prompt.task is not None
            prompt.task.cancel()
        for task in (*self._asked.values(), self._aborting):
            if task is not None:
                task.cancel()

    async def _serve(self, prompt: "_Prompt") -> None:
        """Have a replica answer a prompt."""
        reason, attempt = "", 0
        try:
            while not prompt.has_begun and attempt < self._max_attempts:
                attempt += 1
                try:
                    await self._stream(prompt)
                    return
                except (RayError, RayServeException) as error:
                    reason = _first_line(error)
                    logger.warning("attempt %d at %s: %s", attempt, prompt.work.key, reason)
            text = f"the replica that served this request was lost ({reason})"
            if not prompt.has_begun:
                text = f"{attempt} replicas, one after another, did not serve this ({reason})"
            self._put([_failed(one, text) for one in prompt.unfinished])
        finally:
            for one in prompt.unfinished:
                self._prompts.pop(one, None)

    async def _stream(self, prompt: "_Prompt") -> None:
        response = self._answer.remote(prompt.work)
        try:
            async for data in response:
                outputs = self._decoder.decode(data).outputs
                if prompt.aborted_early:
                    # The replica may not have had the prompt yet when it was told.
                    self._abort_some(prompt, prompt.aborted_early)
                    prompt.aborted_early = []
                prompt.has_begun = True
                for output in outputs:
                    if output.finish_reason is not None:
                        prompt.unfinished.discard(output.request_id)
                        self._prompts.pop(output.request_id, None)
                self._put(outputs)
        except asyncio.CancelledError:
            response.cancel()
            raise
        assert not prompt.unfinished, prompt.unfinished

    def _abort(self, request_ids: list[str]) -> None:
        some: dict[_Prompt, list[str]] = {}
        for one in request_ids:
            prompt = self._prompts.pop(one, None)
            if prompt is not None:
                prompt.unfinished.discard(one)
                some.setdefault(prompt, []).append(one)
        for prompt, ids in some.items():
            if not prompt.unfinished:
                assert prompt.task is not None
                prompt.task.cancel()
            else:
                # The stream goes on for the other samples.
                self._abort_some(prompt, ids)
                if not prompt.has_begun:
                    prompt.aborted_early += ids

    def _abort_some(self, prompt: "_Prompt", request_ids: list[str]) -> None:
        self._to_abort += [_ToAbort(one, prompt) for one in request_ids]
        if self._aborting is None:
            self._aborting = _start(self._tell_aborts())
            self._aborting.add_done_callback(self._check)

    async def _tell_aborts(self) -> None:
        """Tell all replicas, of which each knows its requests. What is to be aborted meanwhile is
        told together, so that many aborts are few messages. If a replica fails to answer, it may
        be the one that serves the request, so all are told again while the prompt has an answer
        under way."""
        while self._to_abort:
            told, self._to_abort = self._to_abort, []
            request_ids = [one.request_id for one in told]
            try:
                answers = await self._tell("abort", request_ids, within_s=_PATIENCE_S)
            except EngineDeadError as error:
                answers = [error]
            errors = [one for one in answers if isinstance(one, BaseException)]
            if errors:
                reason = _first_line(errors[0])
                logger.warning("an abort may not have reached a replica: %s", reason)
                self._to_abort += [
                    one._replace(num_told=one.num_told + 1)
                    for one in told
                    if one.prompt.unfinished and one.num_told < _MAX_ABORTS
                ]
        self._aborting = None

    def _put(self, outputs: list[EngineOutput]) -> None:
        self._incoming.put_nowait(Outputs(outputs))

    def _check(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._incoming.put_nowait(error)


class _Prompt:
    """A prompt whose requests are not all finished."""

    def __init__(self, work: Work):
        self.work = work
        self.unfinished = {one.request_id for one in work.add.requests()}
        self.has_begun = False  # whether an output has been passed on
        self.aborted_early: list[str] = []  # requests of it, before that
        self.task: asyncio.Task[None] | None = None


class _ToAbort(NamedTuple):
    """A request whose prompt has other ones that go on."""

    request_id: str
    prompt: _Prompt
    num_told: int = 1


class _Known(NamedTuple):
    """The answer of all replicas to a command."""

    answer: Any
    at: float  # by `_now`


def _start(work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    """Start a task outside the HTTP request from which it is started. Within it, Serve would give
    all calls of replicas the id of that request. Then its router could not tell the prompts of one
    request apart, and would cancel what several requests share when the first one ends."""
    return asyncio.create_task(work, context=contextvars.Context())


def _now() -> float:
    return asyncio.get_running_loop().time()


def _failed(request_id: str, reason: str) -> EngineOutput:
    return EngineOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=reason)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
