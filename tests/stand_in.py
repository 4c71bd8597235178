"""The one test double of an executor."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from jaxllm.cache_groups import CacheGroup
from jaxllm.lora.request import AdapterLimits
from jaxllm.lora.shelf import HostShelf
from jaxllm.messages import EngineInfo
from jaxllm.metrics.memory import DeviceMemory
from jaxllm.scheduler.schedule import Schedule, StepResult

TOKEN = 11  # what a row of no device samples
INFO = EngineInfo(
    model="model",
    model_dir="",
    vocab_size=100,
    max_model_len=256,
    max_logprobs=0,
    eos_token_ids=[],
    max_num_seqs=4,
    max_num_batched_tokens=64,
    cache_groups=(CacheGroup(window=None, num_blocks=64, max_blocks_per_request=16),),
    block_size=16,
)


class StandIn:
    """Stands in front of an executor, or in place of one: then a step is done at once, and every
    row samples TOKEN. What the device does wrong is what its hooks raise, or wait for."""

    def __init__(
        self,
        executor: Any = None,
        *,
        number: int = 0,
        adapters: AdapterLimits | None = None,
        on_execute: Callable[[Schedule], object] = lambda schedule: None,
        on_result: Callable[[Schedule], object] = lambda schedule: None,
    ):
        self._executor = executor or _NoDevice(number, adapters)
        self._on_execute = on_execute  # called before a step is executed
        self._on_result = on_result  # called before its result is there
        self.is_busy = False  # while it is, no step is ready
        self.num_steps = 0
        self.results: list[StepResult] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute(self, schedule: Schedule) -> "_Pending":
        self.num_steps += 1
        self._on_execute(schedule)
        return _Pending(self, schedule, self._executor.execute(schedule))


class _Pending:
    """A step under way."""

    def __init__(self, stand_in: StandIn, schedule: Schedule, pending: Any):
        self._stand_in = stand_in
        self._schedule = schedule
        self._pending = pending

    def is_ready(self) -> bool:
        return not self._stand_in.is_busy and self._pending.is_ready()

    def result(self) -> StepResult:
        assert not self._stand_in.is_busy, "the whole engine would wait for one device"
        self._stand_in._on_result(self._schedule)
        result = self._pending.result()
        self._stand_in.results.append(result)
        return result


class _NoDevice:
    """Has a number, and notes what else it is asked to do."""

    num_token_rows = num_compiles_after_warmup = 0
    pack_s = 0.0
    startup = ()

    def __init__(self, number: int, adapters: AdapterLimits | None):
        self.number = number
        self.info = msgspec.structs.replace(INFO, adapters=adapters)
        self.asked: list[str] = []

    def execute(self, schedule: Schedule) -> "_Done":
        return _Done(schedule.num_rows)

    def shelf(self) -> HostShelf:
        assert self.info.adapters is not None
        return HostShelf(self.info.adapters, lambda adapter: adapter)

    def check(self) -> None: ...

    def device_memory(self) -> list[DeviceMemory]:
        return [DeviceMemory(self.number, 5, 7, 9)]

    def sleep(self, *, keep_weights: bool) -> None:
        self.asked.append("sleep" if keep_weights else "sleep without weights")

    def wake_weights(self) -> None:
        self.asked.append("wake weights")

    def wake_cache(self) -> None:
        self.asked.append("wake cache")

    def begin_to_end(self) -> None: ...

    def free(self) -> None: ...


class _Done:
    def __init__(self, num_rows: int):
        self._num_rows = num_rows

    def is_ready(self) -> bool:
        return True

    def result(self) -> StepResult:
        return StepResult(np.full(self._num_rows, TOKEN, np.int32), None)
