"""Runs steps in this process, on its devices."""

import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.executor.base import PendingResult
from jaxllm.logging import init_logger
from jaxllm.lora.shelf import Shelf
from jaxllm.messages import EngineInfo
from jaxllm.metrics.memory import DeviceMemory
from jaxllm.metrics.startup import Phases
from jaxllm.plan.stages import replica_devices
from jaxllm.programs.sizing import plan_engine
from jaxllm.programs.summary import summary
from jaxllm.runner.model_runner import ModelRunner
from jaxllm.scheduler.schedule import LateMasks, Mover, Schedule

logger = init_logger(__name__)


class UniProcExecutor:
    """Plans one replica and runs it on devices of this process."""

    def __init__(self, config: EngineConfig, replica: int = 0):
        self.startup = Phases()
        with self.startup.timed("Plan"):
            self.plan = plan_engine(config, replica_devices(config.parallel, replica))
        logger.info("plan: %s", summary(self.plan))
        self._runner = ModelRunner(self.plan, replica)
        self.info: EngineInfo = self.plan.info()
        self.info.hand_over = self._runner.hand_over()
        self.startup += self._runner.startup

    @property
    def num_token_rows(self) -> int:
        return self._runner.num_token_rows

    @property
    def pack_s(self) -> float:
        return self._runner.pack_s

    @property
    def num_compiles_after_warmup(self) -> int:
        return self._runner.num_compiles_after_warmup

    def device_memory(self) -> list[DeviceMemory]:
        return self._runner.device_memory()

    def execute(self, schedule: Schedule) -> PendingResult:
        return self._runner.execute(schedule)

    def late_drafts(self) -> np.ndarray | None:
        return self._runner.late_drafts()

    def sample(self, masks: LateMasks) -> None:
        self._runner.sample(masks)

    def shelf(self) -> Shelf:
        return self._runner.shelf()

    def mover(self) -> Mover:
        return self._runner.mover()

    def check(self) -> None:
        """Do nothing: in one process a failure raises in its step."""

    def reset(self) -> None:
        self._runner.reset()

    def sleep(self, *, keep_weights: bool) -> None:
        self._runner.sleep(keep_weights=keep_weights)

    def wake_weights(self) -> None:
        self._runner.wake_weights()

    def wake_cache(self) -> None:
        self._runner.wake_cache()

    def begin_shutdown(self) -> None:
        self._runner.begin_to_end()

    def shutdown(self) -> None:
        self._runner.free()
