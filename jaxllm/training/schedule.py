"""The progress of a run, and its learning rate.

The rate rises, stays constant, and falls to zero at the end. While it is constant, it does not
depend on the end of the run. So a run can be ended early or prolonged.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The end of a run: by steps, by time, or by whichever comes first."""

    steps: int | None
    seconds: float | None
    learning_rate: float
    warmup_steps: int
    decay_share: float

    def progress(self, step: int, seconds: float) -> float:
        """The finished share of the run, from 0 to 1."""
        shares = [0.0]
        if self.steps is not None:
            shares.append(step / self.steps)
        if self.seconds is not None:
            shares.append(seconds / self.seconds)
        return min(1.0, max(shares))

    def rate(self, step: int, seconds: float) -> float:
        """The learning rate of a step (the first is 0) that begins after `seconds`."""
        rise = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        left = 1.0 - self.progress(step, seconds)
        fall = min(1.0, left / self.decay_share) if self.decay_share else 1.0
        return self.learning_rate * min(rise, fall)
