"""Which running requests a step may serve, where steps pass through several stages of a pipeline.

As many steps can be under way as there are stages, if none of them waits for another. A request
that goes on from a sampled token waits for the step that samples it, so requests that generate are
dealt out to as many *lanes* as there are stages, and steps serve the lanes in turn: when the turn
comes round, the lane's last step is just leaving the last stage. A prompt waits for no token: until
its end is computed, a request is in no lane, and its chunks may be in any step.

Lanes are for speed alone. Whatever a step serves, the device waits for the tokens that it needs.
"""

from collections.abc import Iterable

from jaxllm.scheduler.request import NO_LANE, Request


class Lanes:
    """Deals out requests to lanes, and lets the lanes take turns."""

    def __init__(self, num_lanes: int, *, max_in_flight: int = 1):
        """Make the lanes. A request is not served while more than `max_in_flight` of its tokens
        are on their way: running further ahead of the host gains nothing. 0 waits for each."""
        self._num_lanes = num_lanes
        self._max_in_flight = max_in_flight
        self._last = num_lanes - 1  # served by the step before
        self._turn = 0

    def take_turn(self, running: list[Request]) -> list[Request]:
        """The requests that the next step may serve, in the order in which they are given: those
        of the next lane that can go on, and those in no lane. Nothing counts until `dispatch`."""
        lanes = [(self._last + 1 + i) % self._num_lanes for i in range(self._num_lanes)]
        ready = {request.lane for request in running if self._is_ready(request)}
        self._turn = next((lane for lane in lanes if lane in ready), lanes[0])
        self._deal_out(running)
        return [
            request
            for request in running
            if request.lane == NO_LANE or request.lane == self._turn and self._is_ready(request)
        ]

    def dispatch(self, step: int, rows: Iterable[Request]) -> None:
        """Note that a step was dispatched, after what it samples has been counted."""
        self._last = self._turn
        for request in rows:
            if request.num_in_flight:
                request.lane, request.sampled_in = self._turn, step

    @staticmethod
    def carried_from(rows: Iterable[Request]) -> int:
        """The newest step that samples what one of these rows goes on from; -1 if the host has
        all of it."""
        return max((request.sampled_in for request in rows if request.num_in_flight), default=-1)

    def _is_ready(self, request: Request) -> bool:
        return (
            request.num_in_flight <= self._max_in_flight
            and request.num_tokens < request.max_num_tokens
        )

    def _deal_out(self, running: list[Request]) -> None:
        """Let the lane whose turn it is hand over what it has too much. The others' turns come
        later, so nobody is served before his token is there; and all are equal in the end."""
        members: list[list[Request]] = [[] for _ in range(self._num_lanes)]
        for request in running:
            if request.lane != NO_LANE:
                members[request.lane].append(request)
        own = members[self._turn]
        while len(own) > 1 + len(least := min(members, key=len)):
            own[-1].lane = members.index(least)
            least.append(own.pop())
