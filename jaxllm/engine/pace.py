"""Estimates how long the step on the device will still take, from earlier steps of its kind."""

from jaxllm.scheduler.schedule import Schedule

# The next step should be ready this share of a step, and at least so many seconds, before the end.
_SHARE = 0.25
_SECONDS = 0.002
# How often the loop checks whether the device is done sooner than expected.
LOOK_S = 0.005
# The largest factor by which an expectation rises from one step to the next.
_UP = 1.1


class Pace:
    """The expected end of each step."""

    def __init__(self) -> None:
        self._expected: dict[tuple[bool, int], float] = {}
        self._kind = (False, 0)
        self._began = 0.0
        self._plan_s = 0.0

    def begin(self, schedule: Schedule, now: float) -> None:
        """Note that the device begins a step."""
        self._kind = schedule.decode_only, schedule.total_tokens.bit_length()
        self._began = now

    def planned(self, seconds: float) -> None:
        """Note how long the host took to plan and dispatch a step. A long time is forgotten only
        gradually."""
        self._plan_s = max(seconds, 0.9 * self._plan_s)

    def end(self, now: float, was_seen: bool) -> None:
        """Note that the step has ended. If its end was not seen, the host was too late, so its
        expectation was wrong and is dropped."""
        if was_seen:
            took = now - self._began
            self._expected[self._kind] = min(took, self._expected.get(self._kind, took) * _UP)
        else:
            self._expected.pop(self._kind, None)

    def spare_s(self, now: float) -> float:
        """How long the host may wait and still have the next step ready in time."""
        expected = self._expected.get(self._kind, 0.0)
        wanted = self._began + expected - max(expected * _SHARE, _SECONDS)
        return max(0.0, wanted - self._plan_s - now)
