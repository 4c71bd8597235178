"""Layers with a window keep what is within it: the cache grows with the window, not with the
context, and the tokens stay what they are."""

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.testing import make_tiny_checkpoint

WINDOW, BLOCK = 16, 8
GREEDY = SamplingParams(temperature=0, max_tokens=120, logprobs=1, ignore_eos=True)
OPTIONS = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": BLOCK,
    "num_gpu_blocks_override": 64,
    "kv_cache_request_len": 64,
    "check_invariants": True,
    "enforce_eager": True,
}


def prompt(index, length):
    return [3 + (index * 131 + i * i * 7 + i) % 380 for i in range(length)]


@pytest.fixture(scope="module")
def all_windows(tmp_path_factory):
    """A model whose layers all have a window."""
    path = tmp_path_factory.mktemp("mistral")
    return str(make_tiny_checkpoint(path, "mistral", sliding_window=WINDOW))


@pytest.fixture(scope="module")
def half_windows(tmp_path_factory):
    """A model with a window in one of two layers."""
    return str(
        make_tiny_checkpoint(
            tmp_path_factory.mktemp("qwen2"),
            "qwen2",
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=1,
        )
    )


def watch(llm, prompts, params=GREEDY):
    """The answers' tokens, and the most blocks that were in use, by group."""
    engine = llm.llm_engine
    for index, tokens in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": tokens}, params)
    answers, most = {}, [0] * len(engine.info.cache_groups)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                answers[int(output.request_id)] = output.outputs[0].token_ids
        most = list(map(max, most, engine.stats().group_blocks_used))
    assert engine.stats().group_blocks_used == [0] * len(most)
    return [answers[index] for index in range(len(prompts))], most


def test_a_windowed_cache_grows_with_the_window_and_not_with_the_context(all_windows):
    llm = LLM(all_windows, **OPTIONS)
    (group,) = llm.llm_engine.info.cache_groups
    assert (group.window, group.max_blocks_per_request) == (WINDOW, 7)
    _, short = watch(llm, [prompt(0, 10)])
    _, longer = watch(llm, [prompt(1, 100)])
    assert short == [3]  # in so many blocks can 16 tokens lie
    assert longer == [5]  # of the 7 for a step of 32 tokens, 2 are behind the window after it


def test_only_the_layers_with_a_window_give_blocks_back(half_windows):
    llm = LLM(half_windows, **OPTIONS)
    everything, window = llm.llm_engine.info.cache_groups
    assert (everything.window, window.window) == (None, WINDOW)
    assert everything.max_blocks_per_request == 32 and window.max_blocks_per_request == 7
    assert window.max_blocks_per_request <= window.num_blocks < everything.num_blocks == 64
    _, most = watch(llm, [prompt(1, 100)])
    assert most == [-(-219 // BLOCK), 5]


@pytest.mark.parametrize("model", ["all_windows", "half_windows"])
def test_requests_that_share_few_blocks_get_the_tokens_that_they_get_alone(model, request):
    path = request.getfixturevalue(model)
    few = LLM(path, **{**OPTIONS, "num_gpu_blocks_override": 34, "enable_prefix_caching": False})
    prompts = [prompt(i, length) for i, length in enumerate([100, 5, 40, 90, 17])]
    together, most = watch(few, prompts)
    alone = [watch(few, [one])[0][0] for one in prompts]
    assert together == alone
    # More than one of them was under way.
    assert most[-1] > few.llm_engine.info.cache_groups[-1].max_blocks_per_request


def test_a_prefix_is_found_though_the_blocks_behind_the_window_have_gone(half_windows):
    cold = LLM(half_windows, **{**OPTIONS, "enable_prefix_caching": False})
    llm = LLM(half_windows, **{**OPTIONS, "num_gpu_blocks_override": 160})
    shared = prompt(3, 96)
    follow_ups = [[*shared, *prompt(4 + i, 9)] for i in range(3)]
    watch(llm, [shared])
    # Another request takes blocks that the first has given back.
    watch(llm, [prompt(9, 120)])
    answers, _ = watch(llm, follow_ups)
    assert llm.llm_engine.stats().prefix_cache_hits == 3 * 96
    assert answers == watch(cold, follow_ups)[0]


def test_a_windowed_model_serves_more_requests_at_once_from_the_same_memory(all_windows):
    """Room for one context of the greatest length is room for many windows."""
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    llm = LLM(all_windows, **{**OPTIONS, "num_gpu_blocks_override": 32})
    _, most = watch(llm, [prompt(i, 20) for i in range(4)], params)
    stats = llm.llm_engine.stats()
    assert stats.num_preemptions == 0
    assert most[0] <= 4 * 5 < 4 * (220 // BLOCK)
