"""Requests out of data sets."""

import json

import pytest

from jaxllm.bench.datasets import make_requests
from jaxllm.bench.options import DatasetOptions
from jaxllm.config import ModelConfig
from jaxllm.errors import ValidationError
from jaxllm.frontend.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(ModelConfig(model=tiny_model), tiny_model)


def test_random_prompts_are_as_long_as_asked(tokenizer):
    options = DatasetOptions(num_prompts=20, random_input_len=40, random_output_len=8, seed=3)
    requests = make_requests(options, tokenizer)
    assert len({request.prompt for request in requests}) == 20
    for request in requests:
        assert len(tokenizer.encode(request.prompt)) == request.prompt_len
        assert abs(request.prompt_len - 40) <= 2
        assert request.output_len == 8
    assert requests == make_requests(options, tokenizer)


def test_lengths_vary_within_the_range(tokenizer):
    options = DatasetOptions(
        num_prompts=300, input_len=20, output_len=10, random_range_ratio=0.5, random_prefix_len=16
    )
    requests = make_requests(options, tokenizer)
    outputs = [request.output_len for request in requests]
    assert (min(outputs), max(outputs)) == (5, 15)
    inputs = [request.prompt_len for request in requests]
    assert 24 <= min(inputs) <= 28
    assert 44 <= max(inputs) <= 48
    heads = {request.prompt[:8] for request in requests}
    assert len(heads) == 1


def test_prefixes_repeat(tokenizer):
    options = DatasetOptions(
        dataset_name="prefix_repetition",
        num_prompts=12,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_prefix_len=32,
        prefix_repetition_suffix_len=8,
        prefix_repetition_output_len=5,
    )
    requests = make_requests(options, tokenizer)
    heads = [request.prompt[:16] for request in requests]
    assert sorted(heads.count(head) for head in set(heads)) == [4, 4, 4]
    assert len({request.prompt for request in requests}) == 12
    assert {request.output_len for request in requests} == {5}


def test_sharegpt_takes_the_first_two_turns(tokenizer, tmp_path):
    def talk(*turns):
        return {"conversations": [{"from": "human", "value": turn} for turn in turns]}

    question, answer = "What is the weather like?", "The weather is like the sea."
    path = tmp_path / "talks.json"
    too_long = "word " * 2000
    talks = [talk(question, answer, "more"), talk("alone"), talk("", ""), talk(too_long, answer)]
    path.write_text(json.dumps(talks))
    options = DatasetOptions(dataset_name="sharegpt", dataset_path=str(path), num_prompts=2)
    requests = make_requests(options, tokenizer)
    assert [request.prompt for request in requests] == [question] * 2
    assert requests[0].prompt_len == len(tokenizer.encode(question))
    assert requests[0].output_len == len(tokenizer.encode(answer))


def test_custom_lines(tokenizer, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"prompt": "two", "output_tokens": 3}\n')
    options = DatasetOptions(dataset_name="custom", dataset_path=str(path), num_prompts=3)
    requests = make_requests(options, tokenizer)
    assert [(r.prompt, r.output_len) for r in requests] == [("one", 256), ("two", 3), ("one", 256)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("custom", "{", "not an object with"),
        ("custom", '{"prompt": 1}', 'file:1: "prompt" must be a string'),
        ("custom", "\n", "no request to make of it"),
        ("custom", "[" * 100_000, "not an object with"),
        ("custom", "1" * 5000, "not an object with"),
        ("sharegpt", "[1]", "not a file of ShareGPT"),
        (
            "sharegpt",
            '[{"conversations": [{"value": null}, {"value": "b"}]}]',
            "a value is no string",
        ),
        ("sharegpt", "[" * 100_000, "not a file of ShareGPT"),
        ("sharegpt", "[]", "no request to make of it"),
    ],
)
def test_files_that_do_not_fit(tokenizer, tmp_path, name, text, message):
    path = tmp_path / "file"
    path.write_text(text)
    options = DatasetOptions(dataset_name=name, dataset_path=str(path))
    with pytest.raises(ValidationError, match=message):
        make_requests(options, tokenizer)
