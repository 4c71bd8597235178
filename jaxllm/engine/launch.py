"""Starts the engine that a config asks for."""

from collections.abc import Callable

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.engine.replicas import Replicas
from jaxllm.executor.launch import make_executors
from jaxllm.scheduler.policy import get_scheduling_policy

Engine = EngineCore | Replicas


def make_engine(config: EngineConfig, on_follow: Callable[[], object] = lambda: None) -> Engine:
    """Start an engine core, or several. On hosts that only follow this calls `on_follow`, and does
    not return."""
    # Look the policy up first, so that an unknown one is refused before anything is loaded.
    get_scheduling_policy(config.scheduler.scheduling_policy)
    cores = [EngineCore(config, executor) for executor in make_executors(config, on_follow)]
    return cores[0] if len(cores) == 1 else Replicas(cores)
