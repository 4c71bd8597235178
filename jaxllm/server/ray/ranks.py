"""The ranks of a replica's engine beyond rank 0: an actor in each further bundle of the replica's
placement group. They run and end as the ranks of any engine over several hosts; here they are
started, watched, and ended with the replica."""

import dataclasses
import socket
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxllm.config import EngineConfig
from jaxllm.errors import JaxLLMError
from jaxllm.frontend.engine_process import EngineProcess
from jaxllm.logging import init_logger

logger = init_logger(__name__)

# The bundle is reserved, so this is the time that a worker process of Ray takes to start.
_START_S = 120.0
# How long rank 0 has to say itself why another rank has ended, in better words.
_GRACE_S = 10.0
# What Ray writes on the nodes of TPU slices.
_SLICE, _WORKER = "ray.io/tpu-slice-name", "ray.io/tpu-worker-id"


class Place(NamedTuple):
    """Where an actor is: labels of its node, which are empty but for TPUs."""

    slice_name: str
    worker: str


class Rank:
    """A process in a bundle."""

    def place(self) -> Place:
        return _own_place()

    def follow(self, config: EngineConfig) -> None:
        """Serve rank 0 until it stops. This ends the process and does not return."""
        from jaxllm.executor.launch import make_executors

        make_executors(config)


class FollowingRanks:
    """The ranks beyond 0. Ray ends them if this process, which owns them, is lost."""

    def __init__(self, num_ranks: int):
        """Start a process in each further bundle; raise if one does not start."""
        group = ray.util.get_current_placement_group()
        assert group is not None and group.bundle_count == num_ranks, group
        name = ray.get_runtime_context().get_actor_name()
        self._address = ray.util.get_node_ip_address()
        self._is_stopping = False
        self.reason: str | None = None  # why a rank has ended
        self._actors: list[Any] = []
        try:
            for index, bundle in enumerate(group.bundle_specs[1:], 1):
                actor = cast(Any, ray.remote(Rank)).options(
                    name=f"{name}#rank-{index}",
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        group, placement_group_bundle_index=index
                    ),
                    **_resources(bundle),
                )
                self._actors.append(actor.remote())
            asked = [one.place.remote() for one in self._actors]
            places = ray.get(asked, timeout=_START_S)
            self._actors = in_order(_own_place(), places, self._actors)
        except (RayError, GetTimeoutError) as error:
            self.stop()
            raise JaxLLMError(
                f"Ray did not start the other ranks of an engine with nnodes={num_ranks} in the "
                f"bundles of its placement group ({type(error).__name__}: {error})"
            ) from error
        except BaseException:
            self.stop()
            raise

    def config_of_rank_0(self, config: EngineConfig) -> EngineConfig:
        """The config with the place where the ranks meet: at this host, at a port that is free."""
        with socket.socket() as free:
            free.bind((self._address, 0))
            port = free.getsockname()[1]
        parallel = dataclasses.replace(config.parallel, master_addr=self._address, master_port=port)
        return dataclasses.replace(config, parallel=parallel)

    def follow(self, process: EngineProcess) -> None:
        """Have them follow an engine, which is ended if one of them ends."""
        config = process.assignment.config
        work = []
        for rank, actor in enumerate(self._actors, 1):
            parallel = dataclasses.replace(config.parallel, node_rank=rank)
            work.append(actor.follow.remote(dataclasses.replace(config, parallel=parallel)))
        threading.Thread(
            target=self._watch, args=(work, process), name="ranks", daemon=True
        ).start()

    def _watch(self, work: list[Any], process: EngineProcess) -> None:
        (ended, *_), _ = ray.wait(work, num_returns=1)
        if self._is_stopping:
            return
        rank = 1 + work.index(ended)
        try:
            ray.get(ended)
            self.reason = f"rank {rank} has ended"
        except RayError as error:
            self.reason = f"rank {rank} has ended: {error}"
        # Before it has met the others, rank 0 would wait for them for minutes.
        if not process.wait(_GRACE_S):
            logger.error("the engine is ended: %s", self.reason)
            process.give_up()

    def may_end(self) -> None:
        """Take their end for an orderly one from now on."""
        self._is_stopping = True

    def stop(self) -> None:
        """End those that have not ended with rank 0."""
        self.may_end()
        for one in self._actors:
            ray.kill(one)


def in_order(own: Place, places: list[Place], actors: list[Any]) -> list[Any]:
    """The actors in the order of their ranks. The workers of a TPU slice have numbers, by which
    JAX counts; elsewhere the order of the bundles is as good as any. Raise if they could not meet.
    """
    if any(one.slice_name != own.slice_name for one in places):
        raise JaxLLMError(
            f"the ranks of an engine are on several TPU slices: {own.slice_name!r}, "
            f"{', '.join(repr(one.slice_name) for one in places)}; name one slice in "
            "placement_group_bundle_label_selector"
        )
    if not own.worker:
        return actors
    if own.worker != "0":
        raise JaxLLMError(
            f"rank 0 of an engine is on worker {own.worker} of the TPU slice {own.slice_name!r}; "
            "ask for the resource of its head in the first bundle, such as TPU-v6e-16-head"
        )
    numbered = sorted(zip(places, actors, strict=True), key=lambda one: int(one[0].worker))
    return [actor for _, actor in numbered]


def _own_place() -> Place:
    labels = ray.get_runtime_context().get_node_labels()
    return Place(str(labels.get(_SLICE, "")), str(labels.get(_WORKER, "")))


def _resources(bundle: Mapping[str, float]) -> dict[str, Any]:
    """Options of an actor that takes a whole bundle."""
    others = dict(bundle)
    options: dict[str, Any] = {
        "num_cpus": others.pop("CPU", 0),
        "num_gpus": others.pop("GPU", 0),
    }
    if (memory := others.pop("memory", 0)) > 0:
        options["memory"] = memory
    return options | {"resources": others}
