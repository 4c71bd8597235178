"""Our policy as a request router of Ray Serve. It runs in each frontend, beside the handle.

Ray keeps the queues, the back-pressure, and the set of replicas. The policy says in which order the
replicas should take a request; one that has as many requests as it may have is passed over.
"""

import asyncio
import functools
from typing import Any, NamedTuple

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from jaxllm.engine.router import Router, RoutingPolicy
from jaxllm.logging import init_logger
from jaxllm.server.ray.work import Work

logger = init_logger(__name__)


class _UnderWay(NamedTuple):
    """A request that Ray routes or a replica serves."""

    key: str  # our id
    choice: "asyncio.Future[RunningReplica]"  # of the latest attempt; cancelled with the request
    served_by: ReplicaID | None


class PolicyRouter(RequestRouter):
    """Chooses replicas by `jaxllm.engine.router.Router`, as replicas within an engine are chosen
    and simulated ones."""

    def initialize_state(
        self, policy: RoutingPolicy = "prefix", num_reserved: int = 0, **kwargs: Any
    ) -> None:
        """`num_reserved` of the requests that a replica may have are left to orders: prompts never
        take these places, so an order to a busy replica does not wait for an answer to end."""
        assert not kwargs, kwargs
        self._num_reserved = num_reserved
        self._policy: Router[ReplicaID] = Router((), policy)
        self._under_way: dict[str, _UnderWay] = {}  # by Ray's id

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._policy.set_replicas(one.replica_id for one in replicas)
        most = min((one.max_ongoing_requests for one in replicas), default=None)
        if most is not None and most <= self._num_reserved:
            # Only a config of Serve's own may set it so low.
            logger.warning(
                "max_ongoing_requests=%d of Ray Serve leaves room for one prompt in a replica, "
                "because %d places are reserved; set max_ongoing_requests in the arguments of the "
                "application, which adds these places",
                most,
                self._num_reserved,
            )

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._policy.set_replicas(self.curr_replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not _is_prompt(pending_request):
            return [candidate_replicas]
        # If all are full, ask them again after a while; otherwise Ray would ask without a pause.
        pending_request.routing_context.should_backoff = True
        by_id = {one.replica_id: one for one in candidate_replicas}
        ranked = self._rank(pending_request)
        # Ray asks each of these, in this order, whether it has room.
        return [[self._as_prompts_see(by_id[one])] for one in ranked if one in by_id]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        ray_id = pending_request.metadata.internal_request_id
        one = self._under_way.get(ray_id)
        if one is not None:
            self._under_way[ray_id] = one._replace(served_by=replica_id)
            self._policy.move(one.key, replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Ray calls this for each attempt, also if the replica has refused the request. Then the
        request may wait for another replica, or have one."""
        one = self._under_way.get(internal_request_id)
        if one is None:
            return
        was_served = one.served_by == replica_id
        has_no_replica = one.served_by is None and one.choice.done()
        if was_served or has_no_replica:
            self._end(internal_request_id)

    def _end(self, ray_id: str) -> None:
        one = self._under_way.pop(ray_id, None)
        if one is not None:
            self._policy.forget(one.key)

    def _end_if_cancelled(self, ray_id: str, choice: "asyncio.Future[RunningReplica]") -> None:
        if choice.cancelled():
            self._end(ray_id)

    def _as_prompts_see(self, replica: RunningReplica) -> RunningReplica:
        seen: Any = _WithoutReserve(replica, self._num_reserved)
        return seen

    def _rank(self, pending: PendingRequest) -> list[ReplicaID]:
        """All replicas from the best on."""
        work = pending.args[0]
        self._policy.forget(work.key)  # it may come again, after a replica was full
        self._note(pending, work.key)
        return self._policy.rank(work.add.first, work.num_answers)

    def _note(self, pending: PendingRequest, key: str) -> None:
        """Note a request that waits for a replica. If it is cancelled before it has one, Ray
        reports no end of it."""
        ray_id = pending.metadata.internal_request_id
        known = self._under_way.get(ray_id)
        if known is None or known.choice is not pending.future:
            pending.future.add_done_callback(functools.partial(self._end_if_cancelled, ray_id))
        self._under_way[ray_id] = _UnderWay(key, pending.future, None)


class _WithoutReserve:
    """A replica with room for fewer requests than it takes."""

    def __init__(self, replica: RunningReplica, num_reserved: int):
        self._replica = replica
        self.max_ongoing_requests = max(1, replica.max_ongoing_requests - num_reserved)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)


def _is_prompt(pending: PendingRequest) -> bool:
    return bool(pending.args) and isinstance(pending.args[0], Work)
