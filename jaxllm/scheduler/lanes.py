"""Chooses the running requests that a step may serve in a pipeline of several stages.

A pipeline of n stages can run n steps at once if no step waits for another. A request that goes on
from a sampled token waits for the step that samples it. So the requests that generate are spread
over n *lanes*, and the steps serve the lanes in turn: when the turn of a lane comes again, its last
step is just leaving the last stage. A prompt waits for no token: until its end is computed, a
request is in no lane, and its chunks may be in any step.

Lanes only affect speed. The device waits for the tokens that a step needs, whatever it serves.
"""

from collections.abc import Iterable

from jaxllm.scheduler.request import NO_LANE, Request


class Lanes:
    """Assigns requests to lanes, and lets the lanes take turns."""

    def __init__(self, num_lanes: int, *, max_in_flight: int = 1):
        """Make the lanes. A request is not served while more than `max_in_flight` of its tokens
        are in flight: to run further ahead of the host gains nothing. 0 waits for each token."""
        self._num_lanes = num_lanes
        self._max_in_flight = max_in_flight
        self._last = num_lanes - 1  # the lane that the previous step served
        self._turn = 0

    def take_turn(self, running: list[Request]) -> list[Request]:
        """Return the requests that the next step may serve, in the given order: the ready requests
        of the next lane that has any, and the requests in no lane. The turn passes to the next
        lane only with `dispatch`."""
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
        """Note that a step was dispatched. Its sampled tokens must already be counted."""
        self._last = self._turn
        for request in rows:
            if request.num_in_flight:
                request.lane, request.sampled_in = self._turn, step

    @staticmethod
    def carried_from(rows: Iterable[Request]) -> int:
        """Return the newest step that samples a token from which one of these rows goes on; -1 if
        the host has all these tokens."""
        return max((request.sampled_in for request in rows if request.num_in_flight), default=-1)

    def _is_ready(self, request: Request) -> bool:
        return (
            request.num_in_flight <= self._max_in_flight
            and request.num_tokens < request.max_num_tokens
        )

    def _deal_out(self, running: list[Request]) -> None:
        """Move requests from the lane whose turn it is to smaller lanes. Their turns come later,
        so no request is served before its token is there. In time all lanes get equal sizes."""
        members: list[list[Request]] = [[] for _ in range(self._num_lanes)]
        for request in running:
            if request.lane != NO_LANE:
                members[request.lane].append(request)
        own = members[self._turn]
        while len(own) > 1 + len(least := min(members, key=len)):
            own[-1].lane = members.index(least)
            least.append(own.pop())
