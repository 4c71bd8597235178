"""How many tokens a request may compute in one step: small pure functions, applied in turn.

A limit takes the request, the number of tokens `n` that it would get so far, and the rest of the
step's token budget. It returns `n` or less; 0 means that the request cannot run in this step.
A running request that needs a single token (a decode) is not subject to limits. The limits of the
features (`features.Feature.limit`) come before these.
"""

from collections.abc import Callable

from jaxllm.scheduler.request import Request

Limit = Callable[[Request, int, int], int]


def within_budget(request: Request, n: int, budget: int) -> int:
    """Give at most the rest of the budget."""
    return min(n, budget)


def whole_or_nothing(request: Request, n: int, budget: int) -> int:
    """Never split a prompt over several steps."""
    return n if n <= budget else 0


def long_prefill(threshold: int) -> Limit:
    """Give one request at most `threshold` tokens in a step, to leave room for others."""

    def limit(request: Request, n: int, budget: int) -> int:
        return min(n, threshold)

    return limit


def make_limits(
    *, enable_chunked_prefill: bool, long_prefill_token_threshold: int
) -> tuple[Limit, ...]:
    """Choose the limits by configuration. The threshold is a chunk size, so without chunked prefill
    it has no meaning. 0 turns it off."""
    if not enable_chunked_prefill:
        return (whole_or_nothing,)
    if long_prefill_token_threshold:
        threshold = long_prefill(long_prefill_token_threshold)
        return (threshold, within_budget)
    return (within_budget,)
