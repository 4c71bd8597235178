import pytest

from jaxllm.messages import FinishReason
from jaxllm.scheduler.request import Request


def with_outputs(message, outputs):
    request = Request(message)
    request.output_token_ids = list(outputs)
    request.num_tokens += len(outputs)
    return request


@pytest.mark.parametrize(
    ("start", "end", "tokens"),
    [(0, 2, [1, 2]), (1, 3, [2, 3]), (2, 5, [3, 4, 5]), (3, 5, [4, 5]), (4, 5, [5]), (0, 0, [])],
)
def test_known_tokens_span_prompt_and_output(make_request, start, end, tokens):
    request = with_outputs(make_request("a", [1, 2, 3]), [4, 5])
    assert request.known_tokens(start, end) == tokens


def test_a_sampled_token_is_in_flight_until_it_arrives(make_request):
    request = Request(make_request("a", [1, 2, 3]))
    request.num_tokens += 1
    assert (request.num_in_flight, request.num_known_tokens) == (1, 3)
    request.output_token_ids.append(9)
    assert (request.num_in_flight, request.num_known_tokens) == (0, 4)


@pytest.mark.parametrize(
    ("outputs", "min_tokens", "finish"),
    [
        ([1], 0, None),
        ([1, 8], 0, (FinishReason.STOP, None)),
        ([1, 9], 0, (FinishReason.STOP, 9)),
        ([1, 9], 3, None),
        ([1, 8], 3, None),
        ([1, 2, 9], 3, (FinishReason.STOP, 9)),
        ([1, 2, 3, 9], 0, (FinishReason.STOP, 9)),
        ([1, 2, 3, 4], 0, (FinishReason.LENGTH, None)),
    ],
)
def test_finish_after_a_token(make_request, outputs, min_tokens, finish):
    message = make_request("a", [1], 4, min_tokens=min_tokens, eos_token_ids=[8])
    message.stop_token_ids = [9, 8]
    assert with_outputs(message, outputs).finish_after(outputs[-1]) == finish
