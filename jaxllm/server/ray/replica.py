"""The engine of a replica: an engine process, and what passes messages on to it."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from jaxllm.config import EngineConfig
from jaxllm.ending import patience_s
from jaxllm.engine.commands import GetStats, decode
from jaxllm.errors import EngineDeadError
from jaxllm.frontend.async_client import AsyncClient
from jaxllm.frontend.engine_process import EngineProcess
from jaxllm.logging import init_logger
from jaxllm.messages import (
    OWNER_MARK,
    Abort,
    Add,
    EngineOutput,
    FinishReason,
    Outputs,
    Ready,
    Stop,
)
from jaxllm.server.ray.work import Work

if TYPE_CHECKING:
    from jaxllm.server.ray.ranks import FollowingRanks

logger = init_logger(__name__)

_EXIT_ENGINE_DEAD = 1


class EngineReplica:
    """Takes requests as tokens and gives tokens back: frontends handle text.

    If the engine dies, so does the replica. Then Ray tells everybody, and starts another one.
    """

    def __init__(self, engine_options: Mapping[str, Any], max_prompts: int):
        """Wait until the engine is ready, perhaps for minutes."""
        self._is_running = False
        # Ray lets some more in: it leaves room for aborts and calls, and routers see a new prompt
        # late.
        self._room = asyncio.Semaphore(max_prompts)
        self._ranks: FollowingRanks | None = None
        self._process, self._client = self._start(EngineConfig.create(**engine_options))
        self._encoder = msgspec.msgpack.Encoder()
        self._outputs: dict[str, asyncio.Queue[EngineOutput]] = {}  # by the engine's request id
        self._reader: asyncio.Task[None] | None = None
        self._is_running = True

    def _start(self, config: EngineConfig) -> tuple[EngineProcess, AsyncClient]:
        """Start rank 0 of the engine here, and its other ranks, if it has any, in the further
        bundles of this replica."""
        if (num_ranks := config.parallel.nnodes) != 1:
            from jaxllm.server.ray.ranks import FollowingRanks

            assert isinstance(num_ranks, int), num_ranks
            self._ranks = FollowingRanks(num_ranks)
            config = self._ranks.config_of_rank_0(config)
        process = EngineProcess(config)
        try:
            if self._ranks is not None:
                self._ranks.follow(process)
            return process, AsyncClient(process)
        except BaseException as error:
            process.stop(grace_s=0)
            if self._ranks is not None:
                self._ranks.stop()
                if isinstance(error, EngineDeadError) and self._ranks.reason is not None:
                    raise EngineDeadError(f"{error}; {self._ranks.reason}") from error
            raise

    async def check_health(self) -> None:
        """Raise if the engine has ended. From the first call on a silent engine is noticed, too."""
        self._read_on()
        if self._process.status is not None:
            raise EngineDeadError(f"the engine has ended with status {self._process.status}")

    async def describe(self) -> bytes:
        """Encode what a frontend must know of the engine."""
        return self._encoder.encode(Ready(self._client.info, self._client.startup))

    async def call(self, command: bytes) -> bytes:
        """Run a command; return its encoded answer."""
        self._read_on()
        return self._encoder.encode(await self._client.call(decode(msgspec.Raw(command))))

    async def answer(self, work: Work) -> AsyncIterator[bytes]:
        """Yield encoded outputs until all requests of a prompt have ended. Whoever cancels this
        aborts them."""
        self._read_on()
        async with self._room, contextlib.aclosing(self._answer(work)) as parts:
            async for part in parts:
                yield part

    async def _answer(self, work: Work) -> AsyncGenerator[bytes, None]:
        requests = work.add.requests()
        self._client.own(requests)
        unfinished = {request.request_id for request in requests}
        queue: asyncio.Queue[EngineOutput] = asyncio.Queue()
        self._outputs.update(dict.fromkeys(unfinished, queue))
        self._client.send(Add.of(requests))
        ready: list[EngineOutput] = []
        try:
            while unfinished:
                new = [await queue.get()]
                while not queue.empty():
                    new.append(queue.get_nowait())
                ready += new
                for output in new:
                    if output.finish_reason is not None:
                        unfinished.discard(output.request_id)
                if not (work.is_whole and unfinished):
                    yield self._encoder.encode(Outputs([_as_asked(output) for output in ready]))
                    ready.clear()
        finally:
            for request in requests:
                del self._outputs[request.request_id]
            if unfinished:
                self._client.send(Abort(list(unfinished)))

    async def abort(self, request_ids: list[str]) -> None:
        """Abort those of these requests that are here. The stream of a prompt goes on with the
        others of its requests."""
        asked = frozenset(request_ids)
        ours = [one for one in self._outputs if _asked(one) in asked]
        if not ours:
            return
        self._client.send(Abort(ours))
        for one in ours:
            self._outputs[one].put_nowait(_aborted(one))

    def __del__(self) -> None:
        """Serve calls this when it stops the replica, and Python once more after that."""
        if not self._is_running:
            return
        self._is_running = False
        if self._reader is not None:
            self._reader.cancel()
        if self._ranks is not None:
            self._ranks.may_end()
        self._client.send(Stop())
        self._client.close()
        self._process.stop(patience_s(self._process.assignment.config))
        if self._ranks is not None:
            self._ranks.stop()

    def _read_on(self) -> None:
        if self._reader is None:
            self._client.listen()
            self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            while True:
                message = await self._client.receive()
                if isinstance(message, Outputs):
                    for output in message.outputs:
                        if output.request_id in self._outputs:
                            self._outputs[output.request_id].put_nowait(output)
        except EngineDeadError as error:
            logger.error("the engine has ended, and so does its replica: %s", error)
            os._exit(_EXIT_ENGINE_DEAD)
        except Exception:
            logger.exception("the replica has failed: nobody would get an answer from now on")
            os._exit(_EXIT_ENGINE_DEAD)


class ReportingReplica(EngineReplica):
    """A replica that is scaled by its KV cache, too. Serve calls this some times a minute."""

    async def record_autoscaling_stats(self) -> dict[str, float]:
        self._read_on()
        stats = await self._client.call(GetStats())
        return {"kv_cache_usage": sum(one.kv_cache_usage for one in stats) / len(stats)}


def _aborted(request_id: str) -> EngineOutput:
    return EngineOutput(request_id=request_id, finish_reason=FinishReason.ABORT)


def _asked(request_id: str) -> str:
    """The id that the frontend knows, without the owner and the number that we have added."""
    return request_id.split(OWNER_MARK, 2)[2]


def _as_asked(output: EngineOutput) -> EngineOutput:
    output.request_id = _asked(output.request_id)
    return output
