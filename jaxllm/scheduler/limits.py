"""How many tokens a request may compute in one step: small pure functions, applied in turn.

A limit takes the request, the number of tokens `n` it would get so far and what is left of the
step's token budget, and returns `n` or less. 0 means that the request cannot run in this step.
Requests that want a single token (decodes) are not subject to limits. Those of the features
(`features.Feature.limit`) come before these.
"""

from collections.abc import Callable

from jaxllm.scheduler.request import Request

Limit = Callable[[Request, int, int], int]


def within_budget(request: Request, n: int, budget: int) -> int:
    """Take what is left of the budget."""
    return min(n, budget)


def whole_or_nothing(request: Request, n: int, budget: int) -> int:
    """Never split a prompt over several steps."""
    return n if n <= budget else 0


def long_prefill(threshold: int) -> Limit:
    """Leave room for others: at most `threshold` tokens of one request in a step."""

    def limit(request: Request, n: int, budget: int) -> int:
        return min(n, threshold)

    return limit


def make_limits(
    *, enable_chunked_prefill: bool, long_prefill_token_threshold: int
) -> tuple[Limit, ...]:
    """Choose the limits by configuration. The threshold is a chunk size, so it has no meaning
    without chunks; 0 turns it off."""
    if not enable_chunked_prefill:
        return (whole_or_nothing,)
    if long_prefill_token_threshold:
        threshold = long_prefill(long_prefill_token_threshold)
        return (threshold, within_budget)
    return (within_budget,)
