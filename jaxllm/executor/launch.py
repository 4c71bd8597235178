"""Starts what runs an engine's steps: here, or on several hosts."""

from jaxllm.config import EngineConfig
from jaxllm.executor.base import Executor
from jaxllm.executor.uniproc import UniProcExecutor
from jaxllm.runner.compile import use_compilation_cache


def make_executors(config: EngineConfig) -> list[Executor]:
    """An executor for each replica. On all hosts but the first it does not return: the process
    does there what the first one says, and ends with it."""
    # First of all: planning for an accelerator compiles a step.
    use_compilation_cache(config.compilation.compilation_cache_dir)
    parallel = config.parallel
    if parallel.distributed_executor_backend == "ray":
        from jaxllm.executor.ray import start_followers

        config = start_followers(config)
    if config.parallel.nnodes == 1:
        replicas = range(parallel.data_parallel_size)
        return [UniProcExecutor(config, replica) for replica in replicas]
    from jaxllm.executor.multihost import start

    return list(start(config))
