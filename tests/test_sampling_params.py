import logging
import math

import msgspec
import numpy as np
import pytest

from jaxllm.errors import ValidationError
from jaxllm.sampling_params import BeamSearchParams, SamplingParams


def test_raising_the_temperature_is_said(caplog):
    with caplog.at_level(logging.WARNING, "jaxllm"):
        assert SamplingParams(temperature=0.001).temperature == 0.01
    assert "temperature=0.001 is raised to 0.01" in caplog.text


def test_any_finite_logit_bias_is_accepted():
    assert SamplingParams(logit_bias={3: 1e30, "4": -200}).logit_bias == {3: 1e30, 4: -200}
    for bad in (math.inf, math.nan, "1", 10**400):
        with pytest.raises(ValidationError, match=r"logit_bias\[3\]=.*it must be"):
            SamplingParams(logit_bias={3: bad})


def test_allowed_token_ids_are_kept_once_each():
    assert SamplingParams(allowed_token_ids=[5, 3, 5, 3]).allowed_token_ids == [5, 3]


@pytest.mark.parametrize(
    ("field", "given", "kept"),
    [
        *((field, np.int64(2), 2) for field in ("n", "top_k", "seed", "max_tokens", "min_tokens")),
        *((field, np.int32(2), 2) for field in ("logprobs", "prompt_logprobs")),
        *((field, np.float32(0.5), 0.5) for field in ("temperature", "top_p", "min_p")),
        *((f"{kind}_penalty", np.float16(0.5), 0.5) for kind in ("presence", "frequency")),
        ("repetition_penalty", 10**30, 1e30),
        ("stop_token_ids", [np.int64(3), 3], [3]),
        ("allowed_token_ids", list(np.arange(2)), [0, 1]),
        ("logit_bias", {np.int64(1): np.float64(0.5), 2: 10**30}, {1: 0.5, 2: 1e30}),
    ],
)
def test_numbers_of_all_kinds_reach_another_process(field, given, kept):
    params = SamplingParams(**{field: given})
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert getattr(there, field) == getattr(params, field) == kept


def test_bounds_that_are_not_there_are_not_named():
    with pytest.raises(ValidationError, match="it must be finite, above 0.0$"):
        SamplingParams(repetition_penalty=math.inf)
    with pytest.raises(ValidationError, match="at least 0.0, at most 1000.0$"):
        SamplingParams(temperature=1001)


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_half_a_surrogate_pair_is_no_text(field):
    with pytest.raises(ValidationError, match=f"{field}=.*surrogate"):
        SamplingParams(**{field: ["a\ud800"]})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("max_tokens", None),
        ("ignore_eos", "x"),
        ("include_stop_str_in_output", 1),
        ("skip_special_tokens", None),
        ("temperature", math.nan),
        ("length_penalty", 1e4),
        ("length_penalty", -2000),
    ],
)
def test_bad_beam_search_parameters_are_refused_by_name(field, value):
    with pytest.raises(ValidationError, match=f"{field}=") as caught:
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | {field: value}))
    assert caught.value.parameter == field
