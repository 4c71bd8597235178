"""A request's tokens are those that it has without drafts, whatever the drafts are.

The drafter here is told what to draft: the next tokens of a text that it gets when its request
takes a slot. So one set of programs has drafts that are all right, all wrong, or some of each.
"""

import itertools

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.testing import make_tiny_checkpoint
from tests.drafts import MIXED, RIGHT, WRONG, told

METHOD = {"method": "ngram", "num_speculative_tokens": 3}
LOGPROBS = 3
BASE = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "num_gpu_blocks_override": 32,
    "kv_cache_request_len": 32,
    "max_logprobs": -1,
    "check_invariants": True,
    "enforce_eager": True,
}


def prompt(index: int, length: int) -> list[int]:
    return [3 + (index * 131 + i * i * 7 + i) % 380 for i in range(length)]


def learn(script, outputs, params, is_wrong=RIGHT):
    """Draft the answers that a plain engine has given, but another token where it is wrong."""
    for output, its in zip(outputs, params, strict=True):
        for answer in output.outputs:
            seed = None if its.is_greedy else (its.seed or 0) + answer.index
            script.learn(output.prompt_token_ids, seed, answer.token_ids, is_wrong)


PROMPTS = [prompt(i, length) for i, length in enumerate([1, 5, 16, 17, 33, 48, 20, 60, 3])]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, logprobs=LOGPROBS, ignore_eos=True),
    SamplingParams(temperature=1, seed=1, max_tokens=24, logprobs=LOGPROBS, ignore_eos=True),
    SamplingParams(
        temperature=0.7, top_k=20, seed=2, stop_token_ids=list(range(100, 150)), max_tokens=40,
        logprobs=LOGPROBS,
    ),
    SamplingParams(temperature=1, top_p=0.8, min_p=0.01, seed=3, max_tokens=30, logprobs=LOGPROBS),
    SamplingParams(
        temperature=0, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=25,
        logprobs=LOGPROBS, allowed_token_ids=list(range(10, 20)),
    ),
    SamplingParams(
        temperature=1, seed=5, presence_penalty=1.0, min_tokens=12, max_tokens=15,
        stop_token_ids=list(range(120)), logprobs=LOGPROBS, top_k=30,
    ),
    SamplingParams(
        temperature=0, logit_bias={7: 3.0, 9: -50.0}, max_tokens=18, logprobs=LOGPROBS,
        bad_words=["the", "is a"], allowed_token_ids=list(range(30, 60)),
    ),
    SamplingParams(
        temperature=1, seed=7, allowed_token_ids=list(range(40, 200)), max_tokens=18,
        logprobs=LOGPROBS, n=3, prompt_logprobs=2,
    ),
    SamplingParams(temperature=1, seed=8, max_tokens=40, logprobs=LOGPROBS, stop=["e", "th"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # Two cache groups, of which one has a window.
    return str(
        make_tiny_checkpoint(
            tmp_path_factory.mktemp("qwen2"),
            "qwen2",
            use_sliding_window=True,
            sliding_window=24,
            max_window_layers=1,
            num_key_value_heads=1,
        )
    )


@pytest.fixture(scope="module")
def script():
    """Replaces the drafter of engines that are made in this module."""
    with told() as script:
        yield script


@pytest.fixture(scope="module")
def make_llm(model, script):
    return lambda **options: LLM(model, **{**BASE, "speculative_config": METHOD, **options})


@pytest.fixture(scope="module")
def plain(model):
    return LLM(model, **BASE)


@pytest.fixture(scope="module")
def expected(plain):
    return plain.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.fixture(scope="module")
def llm(make_llm):
    return make_llm()


def stats(llm):
    return llm.llm_engine.stats()


@pytest.fixture
def answers_as_expected(script, expected, assert_same):
    """Drafts of this kind give the plain answers; returns what became of them."""

    def check(llm, is_wrong=MIXED, prompts=PROMPTS, params=PARAMS, expected=expected):
        learn(script, expected, params, is_wrong)
        before = stats(llm)
        llm.reset_prefix_cache()
        assert_same(llm.generate(prompts, params, use_tqdm=False), expected)
        after = stats(llm)
        return (
            after.num_draft_tokens - before.num_draft_tokens,
            after.num_accepted_tokens - before.num_accepted_tokens,
            after.num_steps - before.num_steps,
        )

    return check


def test_right_wrong_and_mixed_drafts_change_no_token(llm, answers_as_expected):
    drafted, accepted, steps = answers_as_expected(llm, WRONG)
    assert drafted > 0
    assert accepted == 0
    drafted, accepted, steps_if_mixed = answers_as_expected(llm, MIXED)
    assert 0 < accepted < drafted
    drafted, accepted, steps_if_right = answers_as_expected(llm, RIGHT)
    # Drafts after the last token are in vain.
    assert 0.8 * drafted < accepted
    assert steps_if_right < steps_if_mixed < steps


def test_right_drafts_take_the_fewest_steps(make_llm, script, expected):
    learn(script, expected, PARAMS)
    llm = make_llm(async_scheduling=False)
    llm.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False)
    # One token with the prompt, four in each further step.
    assert stats(llm).num_steps == 1 + -(-19 // 4)
    assert stats(llm).num_accepted_by_place == [5, 5, 4]


def test_plain_overlap_is_the_same(make_llm, answers_as_expected):
    _, accepted, _ = answers_as_expected(make_llm(async_scheduling=False))
    assert accepted > 0


def test_chunked_prompts_are_the_same(make_llm, answers_as_expected):
    _, accepted, _ = answers_as_expected(make_llm(long_prefill_token_threshold=7))
    assert accepted > 0


def test_cached_prefixes_are_the_same(llm, answers_as_expected, expected, assert_same):
    some = slice(4, 6)
    answers_as_expected(llm, MIXED, PROMPTS[some], PARAMS[some], expected[some])
    before = stats(llm)
    assert_same(llm.generate(PROMPTS[some], PARAMS[some], use_tqdm=False), expected[some])
    after = stats(llm)
    assert after.prefix_cache_hits > before.prefix_cache_hits
    assert after.num_accepted_tokens > before.num_accepted_tokens


def test_an_answer_is_found_as_prefix(llm, script, expected, assert_same):
    """The blocks that were filled by rows with drafts hold what plain rows would have written."""
    learn(script, expected, PARAMS, MIXED)
    llm.reset_prefix_cache()
    [first] = llm.generate(PROMPTS[1:2], PARAMS[1:2], use_tqdm=False)
    longer = PROMPTS[1] + list(first.outputs[0].token_ids)
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=LOGPROBS)
    cached = llm.generate([longer], params, use_tqdm=False)
    assert cached[0].num_cached_tokens == 24  # whole blocks of 5 + 24 tokens, before the last one
    llm.reset_prefix_cache()
    assert_same(llm.generate([longer], params, use_tqdm=False), cached)


def test_preempted_is_undisturbed(make_llm, plain, answers_as_expected):
    prompts = [prompt(50 + i, 16) for i in range(6)]
    params = [
        p.clone(max_tokens=100, min_tokens=0, ignore_eos=True, stop_token_ids=[])
        for p in PARAMS[:6]
    ]
    expected = plain.generate(prompts, params, use_tqdm=False)
    llm = make_llm(enable_prefix_caching=False)
    _, accepted, _ = answers_as_expected(llm, MIXED, prompts, params, expected)
    assert accepted > 0
    assert stats(llm).num_preemptions > 0


def test_others_are_aborted(llm, script, expected, assert_same):
    learn(script, expected, PARAMS, MIXED)
    engine = llm.llm_engine
    for number, (ids, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(number), {"prompt_token_ids": ids}, params)
    engine.add_request("gone", {"prompt_token_ids": PROMPTS[3]}, PARAMS[3].clone(max_tokens=60))
    done = {}
    for step in itertools.count():
        if step == 7:
            engine.abort_request(["gone", "0"])
        done |= {output.request_id: output for output in engine.step() if output.finished}
        if not engine.has_unfinished_requests():
            break
    assert_same([done[str(i)] for i in range(1, len(PROMPTS))], expected[1:])


def test_more_logprobs_than_steps_compute_are_the_same(llm, plain, script, assert_same):
    params = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=count)
        for count in (30, 2)
    ]
    expected = plain.generate(PROMPTS[4:6], params, use_tqdm=False)
    learn(script, expected, params)
    before = stats(llm).num_accepted_tokens
    assert_same(llm.generate(PROMPTS[4:6], params, use_tqdm=False), expected)
    # Of the second request.
    assert 0 < stats(llm).num_accepted_tokens - before < 12


def test_nothing_is_compiled_after_start(make_llm, script, expected):
    learn(script, expected, PARAMS, MIXED)
    llm = make_llm(enforce_eager=False)
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert stats(llm).num_accepted_tokens > 0
    assert stats(llm).num_compiles_after_warmup == 0
