"""Several engine cores as one: replicas of a model that share the requests."""

import functools
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxllm.engine.commands import Answer, Command, obey
from jaxllm.engine.core import EngineCore
from jaxllm.engine.router import Router
from jaxllm.handover.source import HandOver
from jaxllm.messages import EngineInfo, EngineOutput, EngineRequest
from jaxllm.metrics.startup import Phase

# How often the loop checks which devices are done.
_LOOK_S = 0.0005


class Replicas:
    """Engine cores, each with its own devices and the whole model.

    Each core goes at its own pace: none waits for a step of another core.
    """

    def __init__(self, cores: Sequence[EngineCore]):
        self._cores = cores
        self._router = Router(range(len(cores)))
        self.info: EngineInfo = cores[0].info
        parts = [core.info.hand_over for core in cores if core.info.hand_over is not None]
        if parts:
            whole = functools.reduce(HandOver.beside, parts)
            self.info = msgspec.structs.replace(self.info, hand_over=whole)
        self._outputs: list[EngineOutput] = []  # for the next return of `step`

    def add_request(self, request: EngineRequest) -> None:
        replica = request.replica = self._router.choose(request)
        try:
            self._cores[replica].add_request(request)
        except BaseException:
            self._router.forget(request.request_id)
            raise

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            replica = self._router.replica_of(request_id)
            if replica is not None:
                self._cores[replica].abort_requests([request_id])
                self._router.forget(request_id)

    def has_work(self) -> bool:
        return bool(self._outputs) or any(core.has_work() for core in self._cores)

    def check(self) -> None:
        for core in self._cores:
            core.check()

    def progress(self) -> list[int | None]:
        return [count for core in self._cores for count in core.progress()]

    @property
    def spare_s(self) -> float:
        """How long no core is expected to need `step`."""
        return 0.0 if self._outputs or self._due() else _LOOK_S

    def step(self) -> list[EngineOutput]:
        """Step the cores that are due; wait until one is."""
        if not self._outputs:
            for core in self._await_due():
                self._outputs += core.step(wait=False)
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            if output.finish_reason is not None:
                self._router.forget(output.request_id)
        return outputs

    def _await_due(self) -> list[EngineCore]:
        while not (due := self._due()) and self.has_work():
            time.sleep(_LOOK_S)
        return due

    def _due(self) -> list[EngineCore]:
        return [core for core in self._cores if core.has_work() and core.is_due]

    def call(self, command: Command[Any, Answer]) -> Answer:
        """Run a command in each core, or in one core for the whole process."""
        return obey(command, self._cores)

    @property
    def startup(self) -> list[Phase]:
        return [phase for core in self._cores for phase in core.startup]

    def shutdown(self) -> None:
        for core in self._cores:
            core.begin_shutdown()  # all of them write their files at the same time
        for core in self._cores:
            core.shutdown()
