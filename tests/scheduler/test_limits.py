import pytest

from jaxllm.scheduler.limits import make_limits
from jaxllm.scheduler.request import Request


@pytest.mark.parametrize(
    ("chunked", "threshold", "n", "budget", "granted"),
    [
        (True, 0, 100, 64, 64),
        (True, 0, 10, 64, 10),
        (True, 32, 100, 64, 32),
        (True, 32, 100, 16, 16),
        (False, 0, 64, 64, 64),
        (False, 0, 65, 64, 0),
        (False, 32, 64, 64, 64),
    ],
)
def test_tokens_granted_in_a_step(make_request, chunked, threshold, n, budget, granted):
    limits = make_limits(enable_chunked_prefill=chunked, long_prefill_token_threshold=threshold)
    request = Request(make_request("a", n))
    for limit in limits:
        n = limit(request, n, budget)
    assert n == granted
