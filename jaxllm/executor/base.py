"""What the engine core asks of whatever runs its steps."""

from typing import Protocol

from jaxllm.messages import EngineInfo
from jaxllm.metrics.memory import DeviceMemory
from jaxllm.metrics.startup import Phase
from jaxllm.scheduler.schedule import Schedule, StepResult


class PendingResult(Protocol):
    """A dispatched step."""

    def is_ready(self) -> bool:
        """Whether the device may be done with it; does not wait."""
        ...

    def result(self) -> StepResult:
        """Wait for the step; raises what the device raised."""
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
        """What was done before the engine was ready."""
        ...

    def device_memory(self) -> list[DeviceMemory]:
        """Of the devices of this process that tell it."""
        ...

    def execute(self, schedule: Schedule) -> PendingResult:
        """Dispatch a step and return at once; raises when it cannot be dispatched."""
        ...

    def check(self) -> None:
        """Raise EngineDeadError if it is known that no step can run any more."""
        ...

    def reset(self) -> None:
        """Forget all device state after a failed step."""
        ...

    def sleep(self, *, keep_weights: bool) -> None:
        """Give back what the devices hold: the weights go to the host's memory, or are let go, and
        the KV cache is lost. No step may be under way."""
        ...

    def wake_weights(self) -> None:
        """Bring the weights back, or read them again."""
        ...

    def wake_cache(self) -> None:
        """Make an empty KV cache."""
        ...

    def shutdown(self) -> None: ...
