"""The ends of an engine that other engines connect to, and that connect to others."""

from jaxllm.handover.door import Door, LookUp
from jaxllm.handover.source import HandOver
from jaxllm.handover.taker import Taker
from jaxllm.offload.identity import shared_identity
from jaxllm.plan.engine_plan import EnginePlan


class Ends:
    """The door and the taker of a replica: one, both or none of them, as its engine's role asks."""

    def __init__(self, plan: EnginePlan, replica: int):
        self._replica = replica
        self.taker: Taker | None = None  # the mover closes it
        self._door: Door | None = None
        self._asked = None if plan.offload is None else plan.offload.hand_over
        if self._asked is None:
            return
        self._secret, self._identity = self._asked.read_secret(), shared_identity(plan)
        if self._asked.takes:
            self.taker = Taker(self._secret, self._identity, self._asked.kv_timeout)

    def open_door(self, look_up: LookUp) -> None:
        """Let others in, if the engine gives blocks, which `look_up` finds."""
        its = self._asked
        if its is not None and its.gives:
            port = its.kv_port and its.kv_port + self._replica
            self._door = Door(its.kv_ip, port, self._secret, self._identity, look_up)

    def info(self) -> HandOver | None:
        if self._asked is None:
            return None
        gives = () if self._door is None else (self._door.source,)
        return HandOver(gives, self._asked.takes)

    def close(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None
