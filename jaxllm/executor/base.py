"""The contract of an executor, which runs the steps of an engine core."""

from typing import Protocol

import numpy as np

from jaxllm.lora.shelf import Shelf
from jaxllm.messages import EngineInfo
from jaxllm.metrics.memory import DeviceMemory
from jaxllm.metrics.startup import Phase
from jaxllm.scheduler.schedule import LateMasks, Mover, Schedule, StepResult


class PendingResult(Protocol):
    """A dispatched step."""

    def is_ready(self) -> bool:
        """Whether the device may be done with the step; does not wait."""
        ...

    def result(self) -> StepResult:
        """Wait for the step; raise what the device raised."""
        ...


class Executor(Protocol):
    """Runs Schedules strictly in the order of `execute` calls."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def num_token_rows(self) -> int: ...

    @property
    def pack_s(self) -> float: ...

    @property
    def num_compiles_after_warmup(self) -> int: ...

    @property
    def startup(self) -> list[Phase]:
        """The phases of the engine's start."""
        ...

    def device_memory(self) -> list[DeviceMemory]:
        """The memory of the devices of this process that report it."""
        ...

    def execute(self, schedule: Schedule) -> PendingResult:
        """Dispatch a step and return at once; raise if it cannot be dispatched. A step with late
        rows is complete after `sample`, which must come before the next step."""
        ...

    def late_drafts(self) -> np.ndarray | None:
        """Wait for the drafts of the newest step's late rows, int32 [n, k]: in their order, those
        of rows with drafts. None: they came as proposals, or there are none."""
        ...

    def sample(self, masks: LateMasks) -> None:
        """Let the newest step sample its late rows, and return at once."""
        ...

    def shelf(self) -> Shelf:
        """What fetches the adapters of `Schedule.adapter_writes`; only if the engine has some
        (`EngineInfo.adapters`)."""
        ...

    def mover(self) -> Mover:
        """What moves blocks; only if there are places for them (`EngineInfo.host_places`)."""
        ...

    def check(self) -> None:
        """Raise EngineDeadError if no step can run any more, as far as is known."""
        ...

    def reset(self) -> None:
        """Forget all device state after a failed step."""
        ...

    def sleep(self, *, keep_weights: bool) -> None:
        """Free the devices' memory: move the weights to the host's memory, or drop them, and drop
        the KV cache. No step may be in flight."""
        ...

    def wake_weights(self) -> None:
        """Move the weights back to the devices, or read them again."""
        ...

    def wake_cache(self) -> None:
        """Make an empty KV cache."""
        ...

    def begin_shutdown(self) -> None:
        """Begin what takes long of a shutdown, and return at once: several executors end together.
        No step follows."""
        ...

    def shutdown(self) -> None: ...
