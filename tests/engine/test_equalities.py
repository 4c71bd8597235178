"""The same requests give the same tokens however the engine comes to compute them: equal to the
last token, and to 1e-5 in their logprobs. Each test also makes sure that the engine really took
the other way."""

import pytest

from jaxllm import LLM, LLMEngine, SamplingParams
from jaxllm.config import EngineConfig
from jaxllm.testing import make_tiny_checkpoint

LOGPROBS = 3
BASE = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 16,
    "num_gpu_blocks_override": 128,
    # So that the layer with a window keeps all prefixes, too.
    "kv_cache_request_len": 48,
    "check_invariants": True,
    "enforce_eager": True,
}

# The same where blocks are few, so that programs are shared; with smaller steps, too.
BLOCKS_OF_8 = {"block_size": 8, "num_gpu_blocks_override": 32, "max_num_batched_tokens": 16}
BLOCKS_OF_128 = {"block_size": 128, "num_gpu_blocks_override": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # Windows in one of the layers, so that both kinds of attention are in every comparison.
    return str(
        make_tiny_checkpoint(
            tmp_path_factory.mktemp("qwen2"),
            "qwen2",
            use_sliding_window=True,
            sliding_window=24,
            max_window_layers=1,
            num_key_value_heads=1,
            tie_word_embeddings=False,
        )
    )


@pytest.fixture(scope="module")
def make_llm(model):
    return lambda **options: LLM(model, **{**BASE, **options})


@pytest.fixture(scope="module")
def base(make_llm):
    return make_llm()


def prompt(index: int, length: int) -> list[int]:
    return [3 + (index * 131 + i * i * 7 + i) % 380 for i in range(length)]


# Of many lengths and with many parameters: greedy, seeded, penalised, masked.
PROMPTS = [prompt(i, length) for i, length in enumerate([1, 5, 16, 17, 33, 48, 70, 100])]
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
        logprobs=LOGPROBS,
    ),
    SamplingParams(
        temperature=1, seed=5, presence_penalty=1.0, min_tokens=12, max_tokens=15,
        logprobs=LOGPROBS,
    ),
    SamplingParams(
        temperature=0, logit_bias={7: 3.0, 9: -50.0}, bad_words=["the", "is a"], max_tokens=18,
        logprobs=LOGPROBS,
    ),
    SamplingParams(
        temperature=1, seed=7, allowed_token_ids=list(range(40, 200)), max_tokens=18,
        logprobs=LOGPROBS,
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def expected(base):
    return base.generate(PROMPTS, PARAMS, use_tqdm=False)


def stats(llm):
    return llm.llm_engine.stats()


def test_requests_are_varied_enough_to_tell_ways_apart(expected):
    answers = [answer for output in expected for answer in output.outputs]
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    tokens = [answer.token_ids for answer in answers]
    assert len({tuple(ids) for ids in tokens}) == len(tokens)
    assert all(len(set(ids)) > len(ids) / 3 for ids in tokens)


def test_alone_is_as_in_a_crowd(base, expected, assert_same):
    for one_prompt, params, wanted in zip(PROMPTS, PARAMS, expected, strict=True):
        base.reset_prefix_cache()
        assert_same(base.generate([one_prompt], params, use_tqdm=False), [wanted])


def test_crowd_of_thirty_others_changes_nothing(base, expected, assert_same):
    base.reset_prefix_cache()
    others = [prompt(100 + i, 3 + 2 * i) for i in range(30)]
    noise = SamplingParams(temperature=1.3, max_tokens=40, ignore_eos=True)
    ids = base.enqueue(others[:15], noise)
    mine = base.enqueue(PROMPTS, PARAMS)
    ids += base.enqueue(others[15:], noise)
    by_id = {out.request_id: out for out in base.wait_for_completion(use_tqdm=False)}
    assert len(by_id) == len(ids) + len(mine)
    assert_same([by_id[request_id] for request_id in mine], expected)


def test_chunked_is_whole(make_llm, expected, assert_same):
    llm = make_llm(long_prefill_token_threshold=7)
    assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)
    # The longest takes so many steps for its prompt; whole it would be one or two.
    assert stats(llm).num_steps >= len(PROMPTS[-1]) // 7 + len(expected[-1].outputs[0].token_ids)


def test_prefill_without_chunks_is_the_same(make_llm, expected, assert_same):
    llm = make_llm(enable_chunked_prefill=False, max_num_batched_tokens=128)
    assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)


def test_cached_is_cold(base, expected, assert_same):
    # Blocks that others left would be thrown away in the middle, in an order of their own.
    base.reset_prefix_cache()
    base.generate(PROMPTS, PARAMS, use_tqdm=False)
    hits = stats(base).prefix_cache_hits
    again = base.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert stats(base).prefix_cache_hits > hits
    assert [out.num_cached_tokens for out in again] == [(len(p) - 1) // 16 * 16 for p in PROMPTS]
    assert_same(again, expected)


def test_without_prefix_caching_is_the_same(make_llm, expected, assert_same):
    llm = make_llm(enable_prefix_caching=False)
    for _ in range(2):
        assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)
    assert stats(llm).prefix_cache_hits == 0


def test_preempted_is_undisturbed(make_llm, base, assert_same):
    prompts = [prompt(50 + i, 16) for i in range(8)]
    params = [p.clone(max_tokens=60, min_tokens=0, ignore_eos=True) for p in PARAMS]
    expected = base.generate(prompts, params, use_tqdm=False)
    # All are admitted, but only three of them have room for their whole answers.
    llm = make_llm(**BLOCKS_OF_8, enable_prefix_caching=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_same(outputs, expected)
    # Most of them after the first token.
    preemptions = sum(out.metrics.num_preemptions for out in outputs)
    assert preemptions == stats(llm).num_preemptions > 0


def test_overlapped_is_plain(make_llm, base, expected, assert_same):
    llm = make_llm(async_scheduling=False)
    assert stats(base).overlap and not stats(llm).overlap
    assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)


@pytest.mark.parametrize(
    "blocks", [BLOCKS_OF_8, pytest.param(BLOCKS_OF_128, marks=pytest.mark.sweep)], ids=["8", "128"]
)
def test_any_block_size_is_the_same(make_llm, expected, blocks, assert_same):
    llm = make_llm(**blocks)
    assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)


@pytest.mark.sweep
@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), [(2, 16), (16, 300)])
def test_any_bucket_is_the_same(
    make_llm, expected, max_num_seqs, max_num_batched_tokens, assert_same
):
    llm = make_llm(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)


def test_reference_attention_is_the_same(make_llm, expected, assert_same):
    # Small steps of few rows, which are another bucket, and one program for each kind of step.
    llm = make_llm(attention_backend="reference", max_num_seqs=2, max_num_batched_tokens=16)
    assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)


@pytest.mark.parametrize("caching", [True, False])
def test_n_answers_are_separate_requests_with_the_same_seeds(make_llm, caching, assert_same_answer):
    llm = make_llm(enable_prefix_caching=caching)
    params = SamplingParams(temperature=1, n=4, seed=11, max_tokens=16, logprobs=LOGPROBS)
    [together] = llm.generate([PROMPTS[6]], params, use_tqdm=False)
    computed = stats(llm).num_prompt_tokens
    # The prompt's full blocks are computed once for all four.
    assert computed < len(PROMPTS[6]) * 2
    assert [answer.index for answer in together.outputs] == [0, 1, 2, 3]
    for i, answer in enumerate(together.outputs):
        [alone] = llm.generate([PROMPTS[6]], params.clone(n=1, seed=11 + i), use_tqdm=False)
        assert_same_answer(answer, alone.outputs[0])


def test_streamed_is_final(model, expected, assert_streamed_is):
    engine = LLMEngine.from_engine_args(EngineConfig.create(model, **BASE))
    assert_streamed_is(expected, engine, PROMPTS, PARAMS)
