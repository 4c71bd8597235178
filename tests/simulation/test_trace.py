"""Traffic from files and from random numbers."""

import json

import numpy as np
import pytest

from jaxllm.errors import ValidationError
from jaxllm.simulation.trace import PIECE_TOKENS, make_trace, read_trace


def test_json_lines_are_read_in_order_of_time(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 9]},
        {"timestamp": 1000, "input_length": 600, "output_length": 3, "hash_ids": [4, 6]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    trace = read_trace(path)
    assert trace.arrivals.tolist() == [0.0, 2.0]
    first, second = (trace.request(index, 4096) for index in range(2))
    assert first is not None and second is not None
    assert [len(r.prompt_token_ids) for r in (first, second)] == [600, 1100]
    assert (first.max_tokens, second.max_tokens) == (3, 7)
    same = PIECE_TOKENS
    assert first.prompt_token_ids[:same] == second.prompt_token_ids[:same]
    assert first.prompt_token_ids[same] != second.prompt_token_ids[same]
    # The last id stands for what is left of the prompt.
    assert len(set(second.prompt_token_ids)) == 1100


def test_csv_with_dates_is_read(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:47.1805900,396,109\n"
    )
    trace = read_trace(path)
    np.testing.assert_allclose(trace.arrivals, [0, 0.5])
    assert trace.num_prompt_tokens.tolist() == [374, 396]
    assert trace.num_output_tokens.tolist() == [44, 109]
    first, second = (trace.request(index, 4096) for index in range(2))
    assert first is not None and second is not None
    assert first.prompt_token_ids[0] != second.prompt_token_ids[0]


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.jsonl", '{"timestamp": 1, "input_length": 3}', "output_length"),
        ("a.jsonl", "", "no requests"),
        ("a.jsonl", "no", "a.jsonl"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,0,5", "at least one token"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,5", "noon"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnan,1,5", "finite"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,5000000000,5", "5000000000"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 1e999, "output_length": 3}', "infinity"),
        ("a.jsonl", "[" * 100_000, "nested deeper"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValidationError, match=message):
        read_trace(path)


def test_random_traffic_has_the_rate_and_the_lengths_that_were_asked_for():
    options = {"input_len": 1000, "output_len": 100, "num_prefixes": 0, "prefix_len": 0, "seed": 1}
    trace = make_trace(20_000, requests_per_second=8, burstiness=1, spread=0.5, **options)
    gaps = np.diff(trace.arrivals)
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.03)  # a Poisson process
    assert trace.num_prompt_tokens.mean() == pytest.approx(1000, rel=0.02)
    assert trace.num_output_tokens.mean() == pytest.approx(100, rel=0.02)
    bursty = make_trace(20_000, requests_per_second=8, burstiness=0.25, spread=0.5, **options)
    assert np.diff(bursty.arrivals).std() == pytest.approx(2 / 8, rel=0.06)
    again = make_trace(20_000, requests_per_second=8, burstiness=1, spread=0.5, **options)
    np.testing.assert_array_equal(trace.arrivals, again.arrivals)
    np.testing.assert_allclose(trace.at_rate(80).arrivals[-1], 20_000 / 80)


def test_random_prompts_share_as_many_heads_as_asked_for():
    trace = make_trace(
        200,
        requests_per_second=float("inf"),
        burstiness=1,
        input_len=20,
        output_len=10,
        spread=0.1,
        num_prefixes=3,
        prefix_len=1024,
        seed=0,
    )
    requests = [trace.request(index, 4096) for index in range(len(trace))]
    heads = {tuple(request.prompt_token_ids[:1024]) for request in requests if request}
    longer = {tuple(request.prompt_token_ids[:1025]) for request in requests if request}
    assert len(heads) == 3 and len(longer) == 200
