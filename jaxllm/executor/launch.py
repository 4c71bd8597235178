"""Starts the executors of an engine: in this process, or on several hosts."""

from collections.abc import Callable

from jaxllm.config import EngineConfig
from jaxllm.executor.base import Executor
from jaxllm.executor.uniproc import UniProcExecutor
from jaxllm.runner.jax_setup import set_up_jax


def make_executors(
    config: EngineConfig, on_follow: Callable[[], object] = lambda: None
) -> list[Executor]:
    """Make an executor for each replica. On every host but the first this calls `on_follow` and
    does not return: the process follows the first one, and ends with it."""
    set_up_jax(config)
    parallel = config.parallel
    if parallel.distributed_executor_backend == "ray":
        from jaxllm.executor.ray import start_followers

        config = start_followers(config)
    if config.parallel.nnodes == 1:
        executors: list[Executor] = []
        try:
            for replica in range(parallel.data_parallel_size):
                executors.append(UniProcExecutor(config, replica))
        except BaseException:
            for executor in executors:
                executor.shutdown()
            raise
        return executors
    from jaxllm.executor.multihost import start

    return list(start(config, on_follow))
