import jax
import numpy as np
import pytest

from jaxllm.sampling import row_params
from jaxllm.sampling_params import SamplingParams


def decode(*rows, processors=()):
    return jax.jit(lambda packed: row_params.decode(packed, processors))(np.stack(rows))


def test_values_come_back_exactly():
    params = SamplingParams(
        temperature=0.7,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        presence_penalty=-1.5,
        frequency_penalty=0.25,
        repetition_penalty=1.1,
        min_tokens=3,
    )
    row = decode(row_params.encode(params, 0xFEDCBA9876543210))
    for name, value in {
        "temperature": 0.7,
        "top_p": 0.9,
        "min_p": 0.05,
        "presence": -1.5,
        "frequency": 0.25,
        "repetition": 1.1,
    }.items():
        assert getattr(row, name)[0] == np.float32(value), name
    assert row.top_k[0] == 40 and row.min_tokens[0] == 3
    assert row.seed[0].tolist() == [0xFEDCBA98, 0x76543210]
    assert row.flags[0] == row_params.RANDOM | row_params.PENALTIES | row_params.MIN_TOKENS


def test_zeros_are_a_row_that_needs_nothing():
    row = decode(np.zeros(row_params.NUM_PARAMS, np.int32))
    assert row.flags[0] == 0 and row.temperature[0] == 0 and row.top_k[0] == 0
    assert row.top_p[0] == 1 and row.repetition[0] == 1


def test_greedy_rows_carry_no_cuts():
    row = decode(row_params.encode(SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.5), 0))
    assert row.flags[0] == 0
    assert (row.top_k[0], row.top_p[0], row.min_p[0]) == (0, 1, 0)


def test_values_below_float32_stay_on():
    row = decode(row_params.encode(SamplingParams(top_p=1e-300, repetition_penalty=1e-300), 0))
    assert 0 < row.top_p[0] < 1e-30
    assert 0 < row.repetition[0] < 1e-30


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"logit_bias": {1: 1.0}}, row_params.LOGIT_BIAS),
        ({"allowed_token_ids": [1]}, row_params.ALLOWED_IDS),
        ({"bad_words": ["a"]}, row_params.BAD_WORDS),
        ({"min_tokens": 1}, row_params.MIN_TOKENS),
        ({"presence_penalty": 0.1}, row_params.PENALTIES),
        ({"frequency_penalty": -0.1}, row_params.PENALTIES),
        ({"repetition_penalty": 1.1}, row_params.PENALTIES),
        ({"logprobs": 0}, row_params.LOGPROBS),
        ({"logprobs": 1}, row_params.LOGPROBS),
        ({"logprobs": 2}, row_params.LOGPROBS | row_params.MORE_LOGPROBS),
        ({"logprobs": 20}, row_params.LOGPROBS | row_params.MORE_LOGPROBS),
        ({"logprobs": 21}, row_params.LOGPROBS),
        ({"prompt_logprobs": 1}, 0),
        ({"prompt_logprobs": 20}, 0),
        ({"logit_bias": {}}, 0),
    ],
)
def test_each_extra_has_its_flag(fields, flag):
    assert row_params.request_flags(SamplingParams(temperature=0, **fields)) == flag
