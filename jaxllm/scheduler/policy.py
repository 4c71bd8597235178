"""The order in which requests are served: the two built-in policies, and how to add one.

A policy gives each request a sort key when it arrives. Requests with lower keys are admitted and
given tokens first, and preempted last; equal keys are served in order of arrival. The key is
computed once, so it may only depend on what is fixed from then on.

    class ShortestPromptFirst:
        def key(self, request):
            return (request.num_prompt_tokens,)

    jaxllm.register_scheduling_policy("shortest_prompt", ShortestPromptFirst())
    LLM(model, scheduling_policy="shortest_prompt")

A policy that always prefers some requests can starve the others; fcfs cannot.
"""

import math
from typing import Protocol

from jaxllm.errors import ValidationError
from jaxllm.scheduler.request import Request


class SchedulingPolicy(Protocol):
    """Orders requests."""

    def key(self, request: Request) -> tuple:
        """Return the sort key of a request that has just arrived; lower is served first.

        It is a tuple of numbers, of the same length for all requests.
        """
        ...


def checked_key(policy: SchedulingPolicy, request: Request) -> tuple:
    """Return the policy's key of a request. Raise if it is not comparable with other keys."""
    key = policy.key(request)
    if not isinstance(key, tuple) or not all(
        isinstance(part, int | float) and not math.isnan(part) for part in key
    ):
        raise ValidationError(
            f"the scheduling policy {type(policy).__name__} gave the key {key!r}; it must be a "
            "tuple of numbers",
            parameter="scheduling_policy",
            value=key,
        )
    return key


class FirstComeFirstServed:
    """Serves requests in the order in which the engine received them."""

    def key(self, request: Request) -> tuple:
        return ()  # all keys are equal, and equal keys are served in order of arrival


class Priority:
    """Serves the lowest `priority` first, and the earliest arrival among equals."""

    def key(self, request: Request) -> tuple:
        return (request.priority, request.arrival_time)


fcfs = FirstComeFirstServed()
priority = Priority()

_policies: dict[str, SchedulingPolicy] = {"fcfs": fcfs, "priority": priority}


def register_scheduling_policy(name: str, policy: SchedulingPolicy) -> None:
    """Make a policy available as `scheduling_policy=name`."""
    if name in _policies and _policies[name] is not policy:
        raise ValidationError(
            f"a scheduling policy named {name!r} is already registered; choose another name",
            parameter="name",
            value=name,
        )
    if not callable(getattr(policy, "key", None)):
        raise ValidationError(
            f"scheduling policy {name!r} is {policy!r}, which has no method key(request); "
            "register an instance of a class that has one",
            parameter="policy",
            value=policy,
        )
    _policies[name] = policy


def get_scheduling_policy(name: str) -> SchedulingPolicy:
    """Return the policy of that name."""
    policy = _policies.get(name)
    if policy is None:
        raise ValidationError(
            f"scheduling_policy={name!r} is unknown; use one of {', '.join(sorted(_policies))}, "
            "or register yours with jaxllm.register_scheduling_policy",
            parameter="scheduling_policy",
            value=name,
        )
    return policy
