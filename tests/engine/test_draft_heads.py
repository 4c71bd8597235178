"""Heads draft: a request's tokens are those without them, and a head has read what it must.

MiMo's head has the window and the MLP of the model's layers. A model of one such layer, and a head
with its weights that goes by the tokens alone, guess the same of a text longer than the window. So
every draft is right, as long as the head has read what came before: after chunks, cached prefixes,
preemptions and steps without drafts.
"""

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.runner.stage import Stage
from jaxllm.testing import make_tiny_checkpoint
from tests.heads import Formulas, its_own_head, make_eagle

K = 3
WINDOW = 8
# A fourth running request leaves all without drafts.
MTP = {
    "method": "mtp",
    "num_speculative_tokens": K,
    "num_speculative_tokens_per_batch_size": [[1, 3, K]],
}
BASE = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "num_gpu_blocks_override": 8,  # few, since all layers have the window: some must wait
    "kv_cache_request_len": 32,
    "check_invariants": True,
    "enforce_eager": True,
}


def prompt(index: int, length: int) -> list[int]:
    return [3 + (index * 131 + i * i * 7 + i) % 380 for i in range(length)]


# Longer than the window by the token before the first one, which no head reads.
PROMPTS = [prompt(i, length) for i, length in enumerate([10, 16, 17, 33, 48])]
EVERY = {"logprobs": 3, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, **EVERY),
    SamplingParams(temperature=1, seed=1, max_tokens=24, **EVERY),
    SamplingParams(
        temperature=0, repetition_penalty=1.3, bad_words=["the"], max_tokens=22, **EVERY
    ),
    SamplingParams(
        temperature=1, seed=3, top_p=0.8, min_p=0.01, presence_penalty=1.0, max_tokens=30, **EVERY
    ),
    SamplingParams(temperature=0.7, seed=7, top_k=30, n=2, max_tokens=18, **EVERY),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return its_own_head(tmp_path_factory.mktemp("mimo"), WINDOW)


@pytest.fixture(scope="module")
def make_llm(model):
    return lambda **options: LLM(model, **{**BASE, "speculative_config": MTP, **options})


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


def test_a_head_that_is_the_model_drafts_only_what_is_right(llm, drafts_as_expected):
    drafted, accepted = drafts_as_expected(llm)
    assert accepted == drafted > 0


def test_it_takes_the_fewest_steps_and_compiles_nothing(make_llm):
    llm = make_llm(async_scheduling=False, enforce_eager=False)
    llm.generate(PROMPTS[2:3], PARAMS[0], use_tqdm=False)
    # One token with the prompt, four in each further step.
    assert stats(llm).num_steps == 1 + -(-19 // (K + 1))
    assert stats(llm).num_accepted_by_place == [5, 5, 4]
    assert stats(llm).num_compiles_after_warmup == 0


def test_chunks_are_read(make_llm, drafts_as_expected):
    drafted, accepted = drafts_as_expected(make_llm(long_prefill_token_threshold=7))
    assert accepted == drafted > 0


def test_cached_prefixes_are_known(llm, drafts_as_expected, expected):
    llm.reset_prefix_cache()
    some = slice(3, 5)
    drafts_as_expected(llm, PROMPTS[some], PARAMS[some], expected[some])
    hits = stats(llm).prefix_cache_hits
    drafted, accepted = drafts_as_expected(llm, PROMPTS[some], PARAMS[some], expected[some])
    assert accepted == drafted > 0
    assert stats(llm).prefix_cache_hits > hits


def test_preempted_is_undisturbed(make_llm, plain, drafts_as_expected):
    prompts = [prompt(50 + i, 16) for i in range(5)]
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


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_drafts_are_those_of_the_formulas(method, tmp_path, monkeypatch):
    """Of a random head, after a prompt in two chunks. The drafts are read where they lie."""
    taps = {"eagle": (), "eagle3": (0, 1, 2)}[method]
    model = make_tiny_checkpoint(tmp_path / "model")
    fields = {"eagle_aux_hidden_state_layer_ids": [*taps], "draft_vocab_size": 100}
    head = make_eagle(tmp_path / "head", model, method, **(fields if taps else {}))
    seen = [(0, [])]
    run = Stage.run

    def run_and_look(stage, packed, *arrived):
        left = run(stage, packed, *arrived)
        assert stage._state is not None
        seen.append((int(stage._state.lengths[0]), stage._state.drafts[0].tolist()))
        return left

    monkeypatch.setattr(Stage, "run", run_and_look)
    spec = {"method": method, "model": head, "num_speculative_tokens": K}
    options = BASE | {"num_gpu_blocks_override": 32, "async_scheduling": False}
    llm = LLM(str(model), **options, speculative_config=spec)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    [output] = llm.generate(PROMPTS[4:], params, use_tqdm=False)
    text, formulas = PROMPTS[4] + output.outputs[0].token_ids, Formulas(model, head, taps)
    compared = 0
    for (length, old), (_, drafts) in zip(seen, seen[1:], strict=False):
        if drafts != old and any(drafts):
            assert drafts == formulas.drafts(text[: length + 1], K)
            compared += 1
    assert compared >= 3
