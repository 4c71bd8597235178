"""Layers that attend to the keys and values of earlier ones have no cache. What an engine does with
the caches that there are changes no token."""

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.testing import make_tiny_checkpoint

PARAMS = SamplingParams(temperature=0, max_tokens=60, logprobs=1, ignore_eos=True)
OPTIONS = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "num_gpu_blocks_override": 512,
    "kv_cache_request_len": 64,
    "check_invariants": True,
    "enforce_eager": True,
}


def prompt(index, length):
    return [3 + (index * 131 + i * i * 7 + i) % 380 for i in range(length)]


PROMPTS = [{"prompt_token_ids": prompt(i, length)} for i, length in enumerate([100, 5, 40, 90])]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose last three of six layers share, with windows and without."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    return str(
        make_tiny_checkpoint(
            tmp_path_factory.mktemp("model"),
            "gemma4",
            num_hidden_layers=6,
            layer_types=2 * kinds,
            num_kv_shared_layers=3,
            sliding_window=16,
        )
    )


@pytest.fixture(scope="module")
def base(model):
    return LLM(model, **OPTIONS)


@pytest.fixture(scope="module")
def expected(base):
    return base.generate(PROMPTS, PARAMS, use_tqdm=False)


def test_cached_is_cold(base, expected, assert_same):
    again = base.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [out.num_cached_tokens for out in again] == [96, 0, 32, 88]
    assert_same(again, expected)


def test_chunked_is_whole(model, expected, assert_same):
    llm = LLM(model, **OPTIONS, long_prefill_token_threshold=7)
    assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)


def test_preempted_is_undisturbed(model, expected, assert_same):
    few = {"num_gpu_blocks_override": 34, "enable_prefix_caching": False}
    llm = LLM(model, **OPTIONS | few)
    assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)
    assert llm.llm_engine.stats().num_preemptions > 0
