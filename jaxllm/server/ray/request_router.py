"""Our policy as a request router of Ray Serve. It runs in each frontend, beside the handle.

Ray keeps the queues, the back-pressure, and the set of replicas. The policy says in which order the
replicas should take a request; one that has as many requests as it may have is passed over.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from jaxllm.engine.router import Router, RoutingPolicy
from jaxllm.server.ray.work import Work


class PolicyRouter(RequestRouter):
    """Chooses replicas by `jaxllm.engine.router.Router`, as replicas within an engine are chosen
    and simulated ones."""

    def initialize_state(self, policy: RoutingPolicy = "prefix", **kwargs: Any) -> None:
        assert not kwargs, kwargs
        self._policy: Router[ReplicaID] = Router((), policy)
        self._keys: dict[str, str] = {}  # Ray's id of a request under way -> ours

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._policy.set_replicas(one.replica_id for one in replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._policy.set_replicas(self.curr_replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        by_id = {one.replica_id: one for one in candidate_replicas}
        ranked = self._rank(pending_request) if pending_request is not None else []
        found = [[by_id[one]] for one in ranked if one in by_id]
        return found or [candidate_replicas]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        key = self._keys.get(pending_request.metadata.internal_request_id)
        if key is not None:
            self._policy.move(key, replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        key = self._keys.pop(internal_request_id, None)
        if key is not None:
            self._policy.forget(key)

    def _rank(self, pending: PendingRequest) -> list[ReplicaID]:
        """All replicas from the best on; for what is about an earlier request, its replica."""
        if not pending.args:
            return []
        work = pending.args[0]
        if not isinstance(work, Work):
            served_by = self._policy.replica_of(work)
            return [] if served_by is None else [served_by]
        self._policy.forget(work.key)  # it may come again, after a replica was full
        self._keys[pending.metadata.internal_request_id] = work.key
        return self._policy.rank(work.add.first, work.num_answers)
