"""Engines whose layers keep a state of each request: however an engine comes to compute requests,
their tokens are the same. Each test also makes sure that the engine really took the other way."""

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.testing import make_tiny_checkpoint

OPTIONS = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "block_size": 8,
    "num_gpu_blocks_override": 128,
    "mamba_block_size": 32,
    "check_invariants": True,
    "enforce_eager": True,
}
# Seven requests for four slots, so that slots pass on; longer than a tile, and as long.
PROMPTS = [
    {"prompt_token_ids": [3 + (i * 131 + j * j * 7 + j) % 380 for j in range(length)]}
    for i, length in enumerate([140, 5, 64, 1, 90, 63, 2])
]
PARAMS = [
    SamplingParams(
        temperature=i % 2, seed=i, max_tokens=10 + 4 * i, logprobs=1, ignore_eos=i % 3 > 0
    )
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With a delta net and a layer that attends."""
    path, shape = tmp_path_factory.mktemp("model"), {"num_hidden_layers": 2, "layer_types": None}
    return str(make_tiny_checkpoint(path, "qwen3_5", **shape, full_attention_interval=2))


@pytest.fixture(scope="module")
def base(model):
    return LLM(model, **OPTIONS)


@pytest.fixture(scope="module")
def expected(base):
    return base.generate(PROMPTS, PARAMS, use_tqdm=False)


# Tiles and single tokens add the same numbers up in another order, and each layer adds to that.
ATOL = 1e-4


def stats(llm):
    return llm.llm_engine.stats()


def test_alone_is_in_a_crowd(base, expected, assert_same):
    for prompt, params, wanted in zip(PROMPTS, PARAMS, expected, strict=True):
        assert_same(base.generate([prompt], params, use_tqdm=False), [wanted], ATOL)


@pytest.fixture(scope="module")
def cold(model):
    return LLM(model, **OPTIONS, enable_prefix_caching=False)


def test_cached_is_cold(model, base, cold, expected, assert_same):
    assert_same(cold.generate(PROMPTS, PARAMS, use_tqdm=False), expected, ATOL)
    again = base.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert_same(again, expected, ATOL)
    assert again[0].num_cached_tokens > 0
    assert 0 < stats(base).num_snapshots_used <= stats(base).num_snapshots == 8
    assert stats(cold).num_snapshots == stats(cold).prefix_cache_hits == 0


def test_cached_is_cold_to_the_bit_where_rows_end_at_the_same_tokens(model):
    llm = LLM(model, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5)
    prompt = {"prompt_token_ids": PROMPTS[0]["prompt_token_ids"][:134]}
    first, second = (llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 128)
    assert first.outputs[0].logprobs == second.outputs[0].logprobs


def test_what_parts_and_what_was_generated_is_found(model, cold, assert_same):
    llm = LLM(model, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, logprobs=1)
    head = PROMPTS[4]["prompt_token_ids"][:50]
    first, second, third = ({"prompt_token_ids": [7, *head, i, 9]} for i in range(3))
    at_the_stride = {"prompt_token_ids": [8, *head, *range(45)]}
    assert len(at_the_stride["prompt_token_ids"]) == 3 * OPTIONS["mamba_block_size"]
    outputs = llm.generate([first], params, use_tqdm=False)
    turns = [*first["prompt_token_ids"], *outputs[0].outputs[0].token_ids, 4]
    # At the stride; where the two before have parted; in the answer; for the same prompt, of which
    # the last token is computed again.
    for prompt, found in (
        (second, 32),
        (third, 48),
        ({"prompt_token_ids": turns}, 96),
        (at_the_stride, 0),
        (at_the_stride, 64),
    ):
        got = llm.generate([prompt], params, use_tqdm=False)
        assert got[0].num_cached_tokens == found
        assert_same(got, cold.generate([prompt], params, use_tqdm=False), ATOL)


def test_sleep_forgets_snapshots(model, expected, assert_same):
    llm = LLM(model, **OPTIONS)
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    llm.sleep(level=1)
    llm.wake_up()
    again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert {out.num_cached_tokens for out in again} == {0}
    assert_same(again, expected, ATOL)


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65])
def test_chunked_is_whole(model, expected, size, assert_same):
    llm = LLM(model, **OPTIONS, long_prefill_token_threshold=size)
    assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected, ATOL)
    assert stats(llm).num_steps >= 140 // size


def test_preempted_is_undisturbed(model, expected, assert_same):
    few = {"num_gpu_blocks_override": 36, "num_state_snapshots": 3, "max_num_batched_tokens": 16}
    llm = LLM(model, **OPTIONS | few)
    params = [params.clone(max_tokens=100, ignore_eos=True) for params in PARAMS]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert stats(llm).num_preemptions > 0
    assert sum(out.metrics.num_preemptions for out in outputs) > 0
    plenty = LLM(model, **OPTIONS)
    assert_same(outputs, plenty.generate(PROMPTS, params, use_tqdm=False), ATOL)
    assert stats(plenty).num_preemptions == 0


def test_overlapped_is_plain(model, base, expected, assert_same):
    llm = LLM(model, **OPTIONS, async_scheduling=False)
    assert stats(base).overlap and not stats(llm).overlap
    assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected, ATOL)


def test_what_aborted_requests_leave_changes_nothing(base, expected, assert_same):
    noise = SamplingParams(temperature=1.3, max_tokens=100, ignore_eos=True)
    aborted = base.enqueue(PROMPTS[:4], noise)
    mine = base.enqueue(PROMPTS, PARAMS)
    for _ in range(3):
        base.llm_engine.step()
    base.llm_engine.abort_request(aborted)
    by_id = {out.request_id: out for out in base.wait_for_completion(use_tqdm=False)}
    assert_same([by_id[request_id] for request_id in mine], expected, ATOL)


def test_n_answers_are_separate_requests_with_the_same_seeds(base, assert_same_answer):
    params = SamplingParams(temperature=1, n=3, seed=11, max_tokens=16, logprobs=1)
    computed = stats(base).num_prompt_tokens
    [together] = base.generate([PROMPTS[4]], params, use_tqdm=False)
    # All but the first go on from the end of the prompt's last block.
    assert stats(base).num_prompt_tokens <= computed + 90 + 2 * 2
    for i, answer in enumerate(together.outputs):
        [alone] = base.generate([PROMPTS[4]], params.clone(n=1, seed=11 + i), use_tqdm=False)
        assert_same_answer(answer, alone.outputs[0], ATOL)
