"""Engines whose cache has codes of 8 bits: the same requests give the same tokens however the
engine comes to compute them. The errors of the codes are those of `tests/quantization`."""

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY

PROMPTS = [
    {"prompt_token_ids": [3 + (i * 131 + j * j * 7 + j) % 380 for j in range(length)]}
    for i, length in enumerate((4, 60, 33, 1, 47))
]
PARAMS = [
    SamplingParams(temperature=i % 2, seed=i, max_tokens=40, ignore_eos=True, logprobs=0)
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))


def answers(llm):
    completions = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS)]
    return [c.token_ids for c in completions], [c.cumulative_logprob for c in completions]


def stats(llm):
    return llm.llm_engine.stats()


def assert_same(first, second):
    assert first[0] == second[0]
    np.testing.assert_allclose(first[1], second[1], atol=1e-4)


def with_codes(codes):
    return TINY | {"kv_cache_dtype": codes, "calculate_kv_scales": codes == "fp8"}


@pytest.mark.parametrize("codes", ["fp8", "int8"])
def test_an_engine_with_codes_keeps_its_equalities(codes, model):
    llm = LLM(model, **with_codes(codes))
    base = answers(llm)
    # What is cached has been read in other chunks.
    assert_same(answers(llm), base)
    assert stats(llm).prefix_cache_hits > 0
    # Scales are calculated anew, or kept.
    for level in (1, 2):
        llm.sleep(level=level)
        llm.wake_up()
        assert_same(answers(llm), base)
    llm.shutdown()


@pytest.mark.parametrize("codes", ["fp8", pytest.param("int8", marks=pytest.mark.sweep)])
def test_preempted_and_without_native_kernels_is_the_same(codes, model):
    llm = LLM(model, **with_codes(codes))
    base = answers(llm)
    llm.shutdown()
    others = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 12}
    llm = LLM(model, **(with_codes(codes) | others | {"native_kernels": False}))
    assert_same(answers(llm), base)
    assert stats(llm).num_preemptions > 0
    llm.shutdown()


def test_a_draft_model_has_a_cache_of_the_same_codes(model):
    drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    llm = LLM(model, **(TINY | {"kv_cache_dtype": "int8", "speculative_config": drafts}))
    with_drafts, its = answers(llm), stats(llm)
    llm.shutdown()
    llm = LLM(model, **(TINY | {"kv_cache_dtype": "int8"}))
    assert_same(with_drafts, answers(llm))
    llm.shutdown()
    # It is the same model, with the same scales.
    assert its.num_accepted_tokens == its.num_draft_tokens > 0
