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


@pytest.mark.parametrize("chunked", [True, False])
def test_prompt_logprobs_made_of_logits_come_one_at_a_time(make_request, chunked):
    limits = make_limits(enable_chunked_prefill=chunked, long_prefill_token_threshold=0)
    request = Request(make_request("a", 10, prompt_logprobs=21))

    def granted(computed, first):
        request.num_computed_tokens, request.next_prompt_logprob = computed, first
        n = 10 - computed
        for limit in limits:
            n = limit(request, n, 64)
        return n

    assert [granted(0, 1), granted(5, 6), granted(8, 9)] == [1, 1, 1]
    # After a preemption, up to where it was; and at once when all are there.
    assert [granted(0, 6), granted(0, 10)] == [6, 10]
    request.sampling_params.prompt_logprobs = 20
    assert granted(0, 1) == 10
