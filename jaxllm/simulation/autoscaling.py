"""Ray Serve's rule for the number of replicas: so many that each has its target of requests, and of
its KV cache if there is such a target.

The rule follows the means over a time of all unfinished requests and of the caches that they hold.
It decides for a number only after it has wanted to go in that direction for a while.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxllm.engine.scaling import kv_target, needed_replicas
from jaxllm.errors import ValidationError, refused
from jaxllm.option_types import check_type

# How often the rule is asked. Serve does so every 0.1 s, with figures that are as old as
# metrics_interval_s in the mean.
EVERY_S = 0.5
_EPSILON_S = 1e-6
# Fields of Serve's that say nothing about simulated time.
_WITHOUT_EFFECT = ("metrics_interval_s",)


@dataclass(frozen=True, kw_only=True)
class AutoscalingRules:
    """Ray Serve's `autoscaling_config`, with its names and defaults, and our field."""

    min_replicas: int = 1
    max_replicas: int = 1
    initial_replicas: int | None = None
    target_ongoing_requests: float = 2.0
    target_kv_cache_usage: float | None = None
    look_back_period_s: float = 30.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    upscaling_factor: float | None = None
    downscaling_factor: float | None = None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "AutoscalingRules":
        """Check a config. Its further fields are refused: they would scale otherwise."""
        known = {f.name: f for f in fields(cls)}
        values = {name: one for name, one in values.items() if name not in _WITHOUT_EFFECT}
        for name, value in values.items():
            if name not in known:
                raise refused(
                    name, value, f"the simulated rule of Ray Serve has {', '.join(known)}"
                )
            check_type(name, value, known[name].type)
        rules = cls(**values)
        kv_target(values)
        rules._check()
        return rules

    @property
    def start(self) -> int:
        return self.min_replicas if self.initial_replicas is None else self.initial_replicas

    def _check(self) -> None:
        if self.min_replicas < 1:
            raise refused("min_replicas", self.min_replicas, "at least 1 is simulated")
        if not self.min_replicas <= self.start <= self.max_replicas:
            raise ValidationError(
                f"min_replicas={self.min_replicas}, initial_replicas={self.initial_replicas} and "
                f"max_replicas={self.max_replicas} must be in this order"
            )
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float | int) and not 0 <= value < math.inf:
                raise refused(f.name, value, "it must be at least 0")
        for name in (
            "target_ongoing_requests",
            "look_back_period_s",
            "upscaling_factor",
            "downscaling_factor",
        ):
            if getattr(self, name) == 0:
                raise refused(name, 0, "it must be above 0")


class Autoscaler:
    """Decides at each `decide`. Its caller counts requests, and has the replicas and caches."""

    def __init__(self, rules: AutoscalingRules):
        self._rules = rules
        self.target = rules.start
        self._wanted_since: float | None = None
        self._wants_more = False
        # For means: (time, integrals until then of unfinished requests and of caches in use).
        self._past: deque[tuple[float, float, float]] = deque([(0.0, 0.0, 0.0)])
        self._usage_integral = 0.0
        self._num_ongoing = 0
        self._changed_at = 0.0
        self._integral = 0.0

    def note(self, now: float, num_ongoing: int) -> None:
        """Note the number of unfinished requests from now on."""
        self._integral += self._num_ongoing * (now - self._changed_at)
        self._num_ongoing, self._changed_at = num_ongoing, now

    def note_usage(self, usage_seconds: float) -> None:
        """Note the use of the KV caches of all running replicas, over the time since the last
        note."""
        self._usage_integral += usage_seconds

    def decide(self, now: float, num_running: int) -> int:
        """Return how many replicas there should be."""
        return self._decided(now, num_running, *self._means(now))

    def _means(self, now: float) -> tuple[float, float]:
        """The means of unfinished requests, and of caches in use."""
        self.note(now, self._num_ongoing)
        self._past.append((now, self._integral, self._usage_integral))
        while len(self._past) > 2 and self._past[1][0] <= now - self._rules.look_back_period_s:
            self._past.popleft()
        then, integral, usage = self._past[0]
        if now == then:
            return self._num_ongoing, 0.0
        seconds = now - then
        return (self._integral - integral) / seconds, (self._usage_integral - usage) / seconds

    def _decided(
        self, now: float, num_running: int, num_requests: float, usage: float = 0.0
    ) -> int:
        rules = self._rules
        wanted = self._wanted(num_running, num_requests, usage)
        if wanted == self.target:
            self._wanted_since = None
            return self.target
        more = wanted > self.target
        if self._wanted_since is None or more is not self._wants_more:
            self._wanted_since, self._wants_more = now, more
        delay = rules.upscale_delay_s if more else rules.downscale_delay_s
        if now - self._wanted_since + _EPSILON_S >= delay:
            self._wanted_since = None
            self.target = min(max(wanted, rules.min_replicas), rules.max_replicas)
        return self.target

    def _wanted(self, num_running: int, num_requests: float, usage: float) -> int:
        """The number for this load, as far as the factor goes there in one decision."""
        rules = self._rules
        needed = needed_replicas(
            num_requests, rules.target_ongoing_requests, usage, rules.target_kv_cache_usage
        )
        more = needed > num_running
        factor = self._rules.upscaling_factor if more else self._rules.downscaling_factor
        wanted = math.ceil(num_running + (factor or 1.0) * (needed - num_running))
        if math.ceil(needed) < num_running == wanted:
            wanted -= 1  # a small factor must not keep replicas forever
        return max(wanted, 1)
