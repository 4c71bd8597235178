"""Requests fit where nobody has said how long they are, and where somebody has it is checked."""

import pytest

from jaxllm import ValidationError
from jaxllm.bench.lengths import decided, describe
from jaxllm.bench.options import DatasetOptions


def lengths(max_model_len, **options):
    options = decided(DatasetOptions(**options), max_model_len)
    if options.dataset_name == "random":
        return options.random_input_len, options.random_output_len
    return (
        options.prefix_repetition_prefix_len,
        options.prefix_repetition_suffix_len,
        options.prefix_repetition_output_len,
    )


def test_where_there_is_room_lengths_are_those_of_vllm():
    assert lengths(None) == lengths(8192) == (1024, 128)
    assert lengths(8192, dataset_name="prefix_repetition") == (256, 256, 128)


@pytest.mark.parametrize("max_model_len", [2, 16, 256, 1024, 1152])
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_what_was_not_given_shares_the_room_that_is_left(max_model_len, ratio):
    asked, answered = lengths(max_model_len, random_range_ratio=ratio)
    assert asked >= answered >= 1
    assert int(asked * (1 + ratio)) + int(answered * (1 + ratio)) <= max_model_len
    assert sum(lengths(256, dataset_name="prefix_repetition")) <= 256
    # Some room is left for what the server adds.
    assert sum(lengths(1024)) <= 1000


def test_what_was_given_stays():
    assert lengths(256, random_output_len=200)[1] == 200
    assert lengths(256, input_len=100) == (100, 128)
    assert lengths(256, input_len=200, output_len=56) == (200, 56)
    assert lengths(256, random_prefix_len=100, output_len=16)[0] <= 140
    assert describe(decided(DatasetOptions(), 256)).startswith("--random-input-len 213, --random-o")


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"random_input_len": 256}, "--random-input-len 256: requests of 257 tokens or more"),
        ({"input_len": 200, "output_len": 57}, "-len 200, --random-output-len 57: requests of 257"),
        ({"random_prefix_len": 300}, "--random-prefix-len 300"),
        ({"dataset_name": "prefix_repetition", "output_len": 300}, "-repetition-output-len 300"),
        ({"input_len": 180, "output_len": 50, "random_range_ratio": 0.2}, "276 tokens"),
    ],
)
def test_what_was_given_and_has_no_room_is_refused(options, flags):
    with pytest.raises(ValidationError, match=r"has room for 256 \(max_model_len\)") as caught:
        lengths(256, **options)
    assert flags in str(caught.value)
