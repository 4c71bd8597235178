"""A second model drafts: a request's tokens are those without it, and it knows what it must.

The draft is the model itself. So with greedy rows and with random ones every draft is right, as
long as the draft model has read all that came before: after chunks, cached prefixes, preemptions
and steps without drafts. One with other weights is almost always wrong.
"""

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.testing import make_tiny_checkpoint

K = 3
LOGPROBS = 3
# Two cache groups, of which one has a window, and so have layers of the draft.
SHAPE = {
    "family": "qwen2", "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1,
    "num_key_value_heads": 2,
}  # fmt: skip
# A fourth running request leaves all without drafts.
DRAFTS = {
    "num_speculative_tokens": K,
    "num_speculative_tokens_per_batch_size": [[1, 3, K]],
}
BASE = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "num_gpu_blocks_override": 32,
    "kv_cache_request_len": 32,
    "check_invariants": True,
    "enforce_eager": True,
}


def prompt(index: int, length: int) -> list[int]:
    return [3 + (index * 131 + i * i * 7 + i) % 380 for i in range(length)]


PROMPTS = [prompt(i, length) for i, length in enumerate([1, 5, 16, 17, 33, 48])]
EVERY = {"logprobs": LOGPROBS, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, **EVERY),
    SamplingParams(temperature=1, seed=1, max_tokens=24, **EVERY),
    SamplingParams(
        temperature=0, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=22, **EVERY
    ),
    SamplingParams(
        temperature=1, seed=3, top_p=0.8, min_p=0.01, presence_penalty=1.0, max_tokens=30, **EVERY
    ),
    SamplingParams(
        temperature=0, logit_bias={7: 3.0}, bad_words=["the", "is a"], max_tokens=18, **EVERY
    ),
    SamplingParams(temperature=0.7, seed=7, top_k=30, n=2, max_tokens=18, **EVERY),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model"), **SHAPE))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Of the same shapes, so that programs are found in the cache."""
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("other"), seed=1, **SHAPE))


@pytest.fixture(scope="module")
def make_llm(model):
    def make(draft=model, longest=None, **options):
        fields = {"method": "draft_model", "model": draft, "max_model_len": longest, **DRAFTS}
        return LLM(model, **{**BASE, "speculative_config": fields, **options})

    return make


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
def drafts_as_expected(expected, assert_same):
    """The answers are the plain ones; returns how many drafts there were, and how many right."""

    def check(llm, prompts=PROMPTS, params=PARAMS, expected=expected):
        before = stats(llm)
        assert_same(llm.generate(prompts, params, use_tqdm=False), expected)
        after = stats(llm)
        return (
            after.num_draft_tokens - before.num_draft_tokens,
            after.num_accepted_tokens - before.num_accepted_tokens,
        )

    return check


def test_the_model_itself_drafts_only_what_is_right(llm, drafts_as_expected):
    llm.reset_prefix_cache()
    drafted, accepted = drafts_as_expected(llm)
    assert accepted == drafted > 0


def test_it_takes_the_fewest_steps(make_llm, model):
    llm = make_llm(async_scheduling=False)
    llm.generate(PROMPTS[3:4], PARAMS[0], use_tqdm=False)
    # One token with the prompt, four in each further step.
    assert stats(llm).num_steps == 1 + -(-19 // (K + 1))
    assert stats(llm).num_accepted_by_place == [5, 5, 4]


def test_other_weights_change_no_token_and_compile_nothing(make_llm, other, drafts_as_expected):
    llm = make_llm(other, enforce_eager=False)
    drafted, accepted = drafts_as_expected(llm)
    assert accepted < 0.2 * drafted
    assert stats(llm).num_compiles_after_warmup == 0


def test_chunks_are_read(make_llm, drafts_as_expected):
    drafted, accepted = drafts_as_expected(make_llm(long_prefill_token_threshold=7))
    assert accepted == drafted > 0


def test_cached_prefixes_are_known_or_read(llm, drafts_as_expected, expected):
    llm.reset_prefix_cache()
    some = slice(4, 6)
    # A request of one token gets no drafts: of its blocks the draft has read nothing.
    llm.generate(PROMPTS[some], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    for _ in range(2):  # the second time the draft has read the prefixes, too
        hits = stats(llm).prefix_cache_hits
        drafted, accepted = drafts_as_expected(llm, PROMPTS[some], PARAMS[some], expected[some])
        assert accepted == drafted > 0
        assert stats(llm).prefix_cache_hits > hits


def test_preempted_is_undisturbed(make_llm, plain, drafts_as_expected):
    prompts = [prompt(50 + i, 16) for i in range(6)]
    params = [p.clone(max_tokens=100, n=1) for p in PARAMS]
    expected = plain.generate(prompts, params, use_tqdm=False)
    llm = make_llm(enable_prefix_caching=False)
    drafted, accepted = drafts_as_expected(llm, prompts, params, expected)
    assert accepted == drafted > 0
    assert stats(llm).num_preemptions > 0


def test_others_are_aborted(llm, expected, assert_same):
    engine = llm.llm_engine
    for number, (ids, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(number), {"prompt_token_ids": ids}, params)
    engine.add_request("gone", {"prompt_token_ids": PROMPTS[3]}, PARAMS[3].clone(max_tokens=60))
    done, steps = {}, 0
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        steps += 1
        if steps == 7:
            engine.abort_request(["gone", "0"])
    assert_same([done[str(i)] for i in range(1, len(PROMPTS))], expected[1:])


def test_it_reads_what_crowded_steps_have_computed(llm, plain, assert_same):
    params = [PARAMS[0].clone(max_tokens=count) for count in (20, 21, 40, 50)]
    expected = plain.generate(PROMPTS[1:5], params, use_tqdm=False)
    before = stats(llm)
    llm.reset_prefix_cache()
    assert_same(llm.generate(PROMPTS[1:5], params, use_tqdm=False), expected)
    after = stats(llm)
    drafted = after.num_draft_tokens - before.num_draft_tokens
    assert after.num_accepted_tokens - before.num_accepted_tokens == drafted
    # Of the two long answers, after the first twenty tokens.
    assert 0.6 * (20 + 30) < drafted < 20 + 30


def test_sequences_longer_than_the_draft_takes_end_without_drafts(make_llm, plain, assert_same):
    params = PARAMS[0].clone(max_tokens=60)
    expected = plain.generate(PROMPTS[3:4], params, use_tqdm=False)
    llm = make_llm(longest=40, async_scheduling=False)
    assert_same(llm.generate(PROMPTS[3:4], params, use_tqdm=False), expected)
    assert 15 < stats(llm).num_draft_tokens < 30
