"""How long the step on the device will still take, by those before it that were like it."""

from jaxllm.scheduler.schedule import Schedule

# By so much of a step before its end, and at least so many seconds, the next one should be there.
_SHARE = 0.25
_SECONDS = 0.002
# How often it is looked whether the device is done sooner than expected.
LOOK_S = 0.005
# By what an expectation rises at most from one step to the next.
_UP = 1.1


class Pace:
    """The expected end of one step after the other."""

    def __init__(self) -> None:
        self._expected: dict[tuple[bool, int], float] = {}
        self._kind = (False, 0)
        self._began = 0.0
        self._plan_s = 0.0

    def begin(self, schedule: Schedule, now: float) -> None:
        """The device begins with a step."""
        self._kind = schedule.decode_only, schedule.total_tokens.bit_length()
        self._began = now

    def planned(self, seconds: float) -> None:
        """The host has planned and dispatched a step; the longest time counts for a while."""
        self._plan_s = max(seconds, 0.9 * self._plan_s)

    def end(self, now: float, was_seen: bool) -> None:
        """It has ended; unless that was seen, some time before: the host was too late, and what it
        expected was wrong."""
        if was_seen:
            took = now - self._began
            self._expected[self._kind] = min(took, self._expected.get(self._kind, took) * _UP)
        else:
            self._expected.pop(self._kind, None)

    def spare_s(self, now: float) -> float:
        """For how long the host may do nothing, and have the next step ready in time."""
        expected = self._expected.get(self._kind, 0.0)
        wanted = self._began + expected - max(expected * _SHARE, _SECONDS)
        return max(0.0, wanted - self._plan_s - now)
