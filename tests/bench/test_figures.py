"""Figures of a run, against values worked out by hand."""

import pytest

from jaxllm.bench.figures import Outcome, figures, is_good, tokens_per_second
from jaxllm.bench.report import as_text

# 4 tokens in 3 pieces; 1 token; and one that failed.
OUTCOMES = [
    Outcome(10, start=0.0, output_len=4, ttft=0.1, itl=[0.2, 0.4], latency=0.7, text="abc"),
    Outcome(20, start=0.5, output_len=1, ttft=0.3, latency=0.3, text="x"),
    Outcome(30, start=0.6, latency=0.1, error="status 503: busy"),
]


def test_by_hand():
    result = figures(OUTCOMES, 2.0, [50, 99.9], {"ttft": 200.0, "tpot": 250.0})
    approx = {
        "duration": 2.0,
        "total_input_tokens": 30,
        "total_output_tokens": 5,
        "request_throughput": 1.0,
        "output_throughput": 2.5,
        "total_token_throughput": 17.5,
        "request_goodput": 0.5,  # the second took 300 ms
        "mean_ttft_ms": 200.0,
        "median_ttft_ms": 200.0,
        "std_ttft_ms": 100.0,
        "p50_ttft_ms": 200.0,
        "p99.9_ttft_ms": 299.8,
        "mean_tpot_ms": 200.0,  # (0.7 - 0.1) / 3; the answer of one token has none
        "std_tpot_ms": 0.0,
        "mean_itl_ms": 300.0,
        "mean_e2el_ms": 500.0,
        "max_concurrent_requests": 3,
        "max_output_tokens_per_s": 5.0,
    }
    for name, value in approx.items():
        assert result[name] == pytest.approx(value), name
    assert (result["completed"], result["failed"]) == (2, 1)
    assert result["error_counts"] == {"status 503: busy": 1}


def test_names_are_those_that_users_of_vllm_know():
    result = figures(OUTCOMES, 1.0, [99], {})
    expected = {
        "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
        "request_throughput", "output_throughput", "total_token_throughput", "request_goodput",
    }  # fmt: skip
    for metric in ("ttft", "tpot", "itl", "e2el"):
        expected |= {f"{kind}_{metric}_ms" for kind in ("mean", "median", "std", "p99")}
    assert expected <= result.keys()
    assert result["request_goodput"] is None  # nobody asked


def test_nothing_measured_is_not_zero():
    result = figures([OUTCOMES[2]], 1.0, [99], {"e2el": 100.0})
    assert result["mean_ttft_ms"] is None
    assert result["request_goodput"] == 0
    text = as_text(result, ["ttft"], [99])
    assert "1 x status 503: busy" in text


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        ({}, True),
        ({"ttft": 100.0, "tpot": 200.001, "e2el": 700.0}, True),
        ({"ttft": 99.0}, False),
        ({"ttft": 100.0, "tpot": 199.0}, False),
        ({"e2el": 699.0}, False),
    ],
)
def test_a_good_request_keeps_to_every_goal(goals, good):
    assert is_good(OUTCOMES[0], goals) is good


def test_a_failed_request_is_never_good():
    assert not is_good(OUTCOMES[2], {"ttft": 1000.0})


def test_tokens_are_counted_in_the_second_in_which_their_piece_came():
    one = Outcome(1, start=0.5, output_len=6, ttft=0.1, itl=[0.1, 1.0], latency=1.2)
    assert tokens_per_second([one]).tolist() == pytest.approx([4, 2])  # at 0.6, 0.7 and 1.7
    assert tokens_per_second([one], 0.65).tolist() == pytest.approx([2 / 0.65, 2 / 0.65, 2 / 0.65])
