"""Starts the engine that a config asks for."""

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.engine.replicas import Replicas
from jaxllm.executor.launch import make_executors
from jaxllm.scheduler.policy import get_scheduling_policy

Engine = EngineCore | Replicas


def make_engine(config: EngineConfig) -> Engine:
    """Start an engine core, or several. This does not return on hosts that only follow."""
    # Look the policy up first, so that an unknown one is refused before anything is loaded.
    get_scheduling_policy(config.scheduler.scheduling_policy)
    cores = [EngineCore(config, executor) for executor in make_executors(config)]
    return cores[0] if len(cores) == 1 else Replicas(cores)
