"""What a frontend tells the replicas of a fleet, with calls in place of Ray and of the engines."""

import asyncio
import contextvars
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from jaxllm import SamplingParams
from jaxllm.engine.commands import GetMemory
from jaxllm.messages import Abort, Add, EngineOutput, EngineRequest, FinishReason, Outputs
from jaxllm.metrics.memory import EngineMemory

REQUEST: contextvars.ContextVar[str] = contextvars.ContextVar("of an HTTP request", default="")


class Replicas:
    """The handle of a deployment. Its answers end when the test says so."""

    def __init__(self):
        self.callers: list[str] = []  # from which context each call came
        self.told: list[tuple[str, Any]] = []
        self.answers: list[list[Any]] = []  # to broadcasts, one after another
        self.may_end, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()

    def options(self, **how):
        return SimpleNamespace(remote=self._stream)

    async def _stream(self, work):
        self.callers.append(REQUEST.get())
        await self.may_end.wait()
        ended = [
            EngineOutput(request_id=one.request_id, finish_reason=FinishReason.LENGTH)
            for one in work.add.requests()
        ]
        yield msgspec.msgpack.encode(Outputs(ended))

    def broadcast(self, name, what):
        self.callers.append(REQUEST.get())
        self.told.append((name, what))
        answers = self.answers.pop(0) if self.answers else [None]

        async def results_async(**how):
            await self.may_answer.wait()
            return answers

        return SimpleNamespace(results_async=results_async)


def prompt_of(*names):
    requests = [
        EngineRequest(
            request_id=name, prompt_token_ids=[1], sampling_params=SamplingParams(), max_tokens=9,
            seed=0,
        )
        for name in names
    ]  # fmt: skip
    return Add.of(requests)


def memory(num_bytes):
    return msgspec.msgpack.encode(EngineMemory(num_bytes, []))


def run(check):
    pytest.importorskip("ray.serve")
    from jaxllm.server.ray.fleet import Fleet

    async def checked():
        replicas = Replicas()
        fleet = Fleet(replicas, SimpleNamespace(info=None, startup=None), max_attempts=3)  # type: ignore[arg-type]
        await check(fleet, replicas)
        replicas.may_end.set()
        await until(lambda: not fleet._prompts and fleet._aborting is None)

    asyncio.run(asyncio.wait_for(checked(), 300))


async def until(is_so):
    while not is_so():
        await asyncio.sleep(0)


def test_no_call_of_a_replica_belongs_to_the_http_request_it_is_for():
    """Ray gives all calls within a request one id, by which its router tells prompts apart."""

    async def check(fleet, replicas):
        REQUEST.set("the first client's")
        replicas.answers = [[None], [memory(1)]]
        for name in "ab":
            fleet.send(prompt_of(name, name + "1"))
        fleet.send(Abort(["a"]))
        await fleet.call(GetMemory())
        await until(lambda: len(replicas.callers) == 4)
        assert replicas.callers == [""] * 4

    run(check)


def test_an_abort_that_a_replica_may_have_missed_is_told_again():
    async def check(fleet, replicas):
        lost = RuntimeError("it does not answer")
        replicas.answers = [[None, lost], [None, None], *[[lost]] * 3]
        fleet.send(prompt_of("a", "a1", "a2"))
        fleet.send(Abort(["a"]))
        await until(lambda: fleet._aborting is None)
        assert replicas.told == [("abort", ["a"])] * 2
        fleet.send(Abort(["a1"]))  # and one of them never answers
        await until(lambda: fleet._aborting is None)
        assert replicas.told[2:] == [("abort", ["a1"])] * 3

    run(check)


def test_figures_of_before_are_not_older_than_a_call_may_take(monkeypatch):
    async def check(fleet, replicas):
        monkeypatch.setattr("jaxllm.server.ray.fleet._PATIENCE_S", 0.0)
        replicas.answers = [[memory(1)], [memory(2)]]
        assert (await fleet.call(GetMemory())).resident_bytes == 1
        replicas.may_answer.clear()
        assert (await fleet.call(GetMemory())).resident_bytes == 1
        monkeypatch.setattr("jaxllm.server.ray.fleet._CALL_S", 0.0)
        asked = asyncio.create_task(fleet.call(GetMemory()))
        await asyncio.sleep(0.01)
        assert not asked.done()
        replicas.may_answer.set()
        assert (await asked).resident_bytes == 2

    run(check)
