"""Starts the other ranks of an engine on the nodes of a Ray cluster. Ray only starts them: they
work and end as without Ray."""

import dataclasses
from typing import Any, cast

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jaxllm.config import EngineConfig
from jaxllm.errors import JaxLLMError, refused
from jaxllm.logging import init_logger

logger = init_logger(__name__)

_START_TIMEOUT_S = 120
_ACCELERATORS = ("TPU", "GPU")

# References to the ranks: Ray ends an actor that has none.
_ranks: list[Any] = []


class Rank:
    """A process on another node."""

    def is_there(self) -> bool:
        return True

    def follow(self, config: EngineConfig) -> None:
        from jaxllm.executor.multihost import start
        from jaxllm.runner.jax_setup import set_up_jax

        set_up_jax(config)
        start(config)


def start_followers(config: EngineConfig) -> EngineConfig:
    """Start a rank on each other node, with all accelerators of that node. This process is rank 0.
    Return the config with the hosts filled in."""
    if not ray.is_initialized():
        ray.init(address="auto")
    here = ray.get_runtime_context().get_node_id()
    nodes = _nodes(here)
    asked = config.parallel.nnodes
    if asked not in ("auto", 1):
        if asked > len(nodes):
            raise refused("nnodes", asked, f"the Ray cluster has {len(nodes)} such nodes")
        nodes = nodes[:asked]
    parallel = dataclasses.replace(
        config.parallel,
        nnodes=len(nodes),
        node_rank=0,
        master_addr=ray.util.get_node_ip_address(),
        distributed_executor_backend=None,
    )
    config = dataclasses.replace(config, parallel=parallel)
    config.validate()  # what is refused over several hosts
    for rank, node in enumerate(nodes[1:], 1):
        own = dataclasses.replace(parallel, node_rank=rank)
        _ranks.append(_start(node, dataclasses.replace(config, parallel=own)))
    logger.info("Ray: this is rank 0 of %d, at %s", len(nodes), parallel.master_addr)
    return config


def _nodes(here: str) -> list[dict[str, Any]]:
    """The nodes for ranks, this one first: those with accelerators, or all if none has any."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    able = [node for node in alive if _accelerators(node)] or alive
    own = [node for node in able if node["NodeID"] == here]
    if not own:
        raise JaxLLMError(
            "distributed_executor_backend='ray': this process is rank 0, and the node that it runs "
            f"on has no accelerator; {len(able)} others have. Start it on one of these"
        )
    return own + [node for node in able if node["NodeID"] != here]


def _accelerators(node: dict[str, Any]) -> dict[str, float]:
    return {name: node["Resources"][name] for name in _ACCELERATORS if name in node["Resources"]}


def _start(node: dict[str, Any], config: EngineConfig) -> Any:
    accelerators = _accelerators(node)
    rank = cast(
        Any,
        (
            ray.remote(Rank)
            .options(
                num_cpus=0,
                num_gpus=accelerators.pop("GPU", 0),
                resources=accelerators,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            )
            .remote()
        ),
    )
    try:
        ray.get(rank.is_there.remote(), timeout=_START_TIMEOUT_S)
    except RayError as error:
        raise JaxLLMError(
            f"Ray did not start rank {config.parallel.node_rank} on {node['NodeManagerAddress']} "
            f"({type(error).__name__}); are its accelerators taken? `ray status` tells"
        ) from error
    rank.follow.remote(config)
    return rank
