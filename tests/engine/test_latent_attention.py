"""Engines whose layers keep latents: what an engine does with the cache changes no token."""

import logging

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.config import EngineArgs
from jaxllm.errors import ValidationError
from jaxllm.plan import expand_latents
from jaxllm.plan.make_plan import make_plan
from jaxllm.testing import make_tiny_checkpoint
from tests.heads import add_mtp

PARAMS = SamplingParams(temperature=0, max_tokens=40, logprobs=1, ignore_eos=True)
OPTIONS = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "num_gpu_blocks_override": 512,
    "check_invariants": True,
    "enforce_eager": True,
}
PROMPTS = [
    {"prompt_token_ids": [3 + (i * 131 + j * j * 7 + j) % 380 for j in range(length)]}
    for i, length in enumerate([100, 5, 40, 90])
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "deepseek_v3"))


@pytest.fixture(scope="module")
def base(model):
    return LLM(model, **OPTIONS)


@pytest.fixture(scope="module")
def expected(base):
    return base.generate(PROMPTS, PARAMS, use_tqdm=False)


def test_alone_is_in_a_crowd(base, expected, assert_same):
    for prompt, wanted in zip(PROMPTS, expected, strict=True):
        assert_same(base.generate([prompt], PARAMS, use_tqdm=False), [wanted])


def test_cached_is_cold(base, expected, assert_same):
    again = base.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [out.num_cached_tokens for out in again] == [96, 0, 32, 88]
    assert_same(again, expected)


def test_chunked_is_whole(model, expected, assert_same):
    llm = LLM(model, **OPTIONS, long_prefill_token_threshold=7)
    assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)


@pytest.fixture
def expands(monkeypatch):
    """The engine expands prompts of so many tokens, or what a step has of their beginnings."""
    monkeypatch.setattr(expand_latents, "fewest_tokens", lambda spec: 12)


def test_expanded_is_absorbed(model, expected, expands, assert_same, caplog):
    """Whole prompts beside others, beginnings of prompts, and what follows them."""
    with caplog.at_level(logging.INFO):
        llm = LLM(model, **OPTIONS | {"max_num_batched_tokens": 64})
    assert "for prompts of 12 tokens on" in caplog.text
    assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)
    # Behind cached blocks, too.
    assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)


def test_a_head_that_drafts_expands_prompts_as_well(tmp_path, expected, expands, assert_same):
    model = make_tiny_checkpoint(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    add_mtp(model)
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    llm = LLM(str(model), **OPTIONS, speculative_config=drafts)
    plan = make_plan(EngineArgs(str(model), **OPTIONS, speculative_config=drafts))
    assert plan.draft is not None
    assert {config.fewest_fresh for config in plan.draft.attention_configs} == {12}
    drafted = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert_same(drafted, expected)
    stats = llm.llm_engine.stats()
    assert stats.num_draft_tokens > 0


def test_preempted_is_undisturbed_with_the_reference(model, expected, assert_same):
    few = {"num_gpu_blocks_override": 34, "enable_prefix_caching": False}
    llm = LLM(model, **OPTIONS | few, attention_backend="reference")
    assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)
    assert llm.llm_engine.stats().num_preemptions > 0


def test_a_backend_without_latents_is_refused(model):
    message = "attention_backend='mine': the model has latent attention, for which there is"
    with pytest.raises(ValidationError, match=message):
        LLM(model, **OPTIONS, attention_backend="mine")
