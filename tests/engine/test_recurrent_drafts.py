"""Drafts where layers keep states: those that are right advance the states, and no others do.

A request's tokens are those without drafts, whatever the drafts are, and however many of a row's
are right. All is on one engine: its prompts are chunked, its slots pass on, and its blocks are so
few that requests are preempted.
"""

import pytest

from jaxllm import LLM, SamplingParams, StructuredOutputsParams
from jaxllm.testing import make_tiny_checkpoint
from tests.drafts import MIXED, RIGHT, WRONG, told
from tests.heads import make_eagle

BASE = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "num_gpu_blocks_override": 20,
    "mamba_block_size": 16,
    "num_state_snapshots": 24,
    "check_invariants": True,
    "enforce_eager": True,
}
K = 3
EVERY = {"num_speculative_tokens": K, "num_speculative_tokens_per_batch_size": [[1, 4, K]]}
NGRAM = {"speculative_config": {"method": "ngram", **EVERY}}
# A delta net and a layer with attention.
SHAPE = {"num_hidden_layers": 2, "full_attention_interval": 2, "layer_types": None}
PROMPTS = [
    [3 + (i * 131 + j * j * 7 + j) % 380 for j in range(length)]
    for i, length in enumerate([40, 5, 17, 1, 33, 2])
]
PARAMS = [
    SamplingParams(temperature=i % 2, seed=i, max_tokens=40 + 3 * i, logprobs=1, ignore_eos=True)
    for i in range(len(PROMPTS))
]
# Tiles and single tokens add the same numbers up in another order.
ATOL = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_5", **SHAPE)


@pytest.fixture(scope="module")
def plain(model):
    return LLM(str(model), **BASE)


@pytest.fixture(scope="module")
def expected(plain):
    return plain.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.fixture(scope="module")
def script():
    with told() as script:
        yield script


@pytest.fixture(scope="module")
def llm(model, script):
    return LLM(str(model), **BASE, **NGRAM)


def learn(script, expected, is_wrong, params=PARAMS):
    for output, its in zip(expected, params, strict=True):
        seed = None if its.is_greedy else its.seed
        script.learn(output.prompt_token_ids, seed, output.outputs[0].token_ids, is_wrong)


def stats(llm):
    return llm.llm_engine.stats()


def counted(llm, run):
    """What a run returns, and the drafts, those accepted, and the preemptions that it has."""
    names = ("num_draft_tokens", "num_accepted_tokens", "num_preemptions")
    before = [getattr(stats(llm), name) for name in names]
    result = run()
    return result, *(getattr(stats(llm), name) - n for name, n in zip(names, before, strict=True))


@pytest.mark.parametrize("is_wrong", [WRONG, MIXED, RIGHT])
def test_drafts_change_no_token(llm, script, expected, is_wrong, assert_same):
    learn(script, expected, is_wrong)
    llm.reset_prefix_cache()
    outputs, drafted, accepted, preempted = counted(
        llm, lambda: llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    )
    assert_same(outputs, expected, ATOL)
    assert preempted > 0
    if is_wrong is WRONG:
        assert 0 == accepted < drafted
    elif is_wrong is MIXED:
        assert 0 < accepted < drafted
    else:
        assert 0.8 * drafted < accepted
    for num_cached in (None, 32):
        again = llm.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False)
        assert_same(again, expected[:1], ATOL)
        assert again[0].num_cached_tokens == num_cached or num_cached is None


def test_an_answer_has_the_snapshots_that_it_has_without_drafts(
    llm, plain, script, expected, assert_same
):
    learn(script, expected, MIXED)
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=1)
    found = []
    for engine in (plain, llm):
        engine.reset_prefix_cache()
        first, _, accepted, _ = counted(
            engine, lambda engine=engine: engine.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False)
        )
        turns = [*PROMPTS[0], *first[0].outputs[0].token_ids, 4]
        found += engine.generate([turns], params, use_tqdm=False)
    assert accepted > 0
    assert found[0].num_cached_tokens == found[1].num_cached_tokens == 64
    plain.reset_prefix_cache()
    assert_same(found[1:], plain.generate([turns], params, use_tqdm=False), ATOL)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "family", ["qwen3_next", "mamba2", "lfm2", "falcon_h1", "nemotron_h", "kimi_linear"]
)
def test_drafts_change_no_token_of_other_families(family, tmp_path, script, assert_same):
    model = str(make_tiny_checkpoint(tmp_path, family))
    plain, llm = LLM(model, **BASE), LLM(model, **BASE, **NGRAM)
    expected = plain.generate(PROMPTS, PARAMS, use_tqdm=False)
    for is_wrong in (WRONG, MIXED, RIGHT):
        learn(script, expected, is_wrong)
        got, drafted, accepted, _ = counted(
            llm, lambda: llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        )
        assert_same(got, expected, ATOL)
        assert drafted > 0 and (accepted > 0) == (is_wrong is not WRONG)
    prompts, params, wanted = in_form(plain)
    learn(script, wanted, MIXED, params)
    llm.reset_prefix_cache()
    got, _, accepted, _ = counted(llm, lambda: llm.generate(prompts, params, use_tqdm=False))
    assert tokens(got) == tokens(wanted) and accepted > 10


@pytest.mark.sweep
def test_a_draft_model_and_a_head_change_no_token(model, tmp_path, expected, assert_same):
    draft = make_tiny_checkpoint(tmp_path / "draft")
    head = make_eagle(
        tmp_path / "head",
        model,
        "eagle3",
        rope_theta=10_000.0,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
    )
    for fields in (
        {"method": "draft_model", "model": str(draft)},
        {"method": "eagle3", "model": str(head)},
    ):
        llm = LLM(str(model), **BASE, speculative_config=fields | EVERY)
        got, drafted, _, preempted = counted(
            llm, lambda llm=llm: llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        )
        assert_same(got, expected, ATOL)
        assert drafted > 0 and preempted > 0


FORMS = ("[a-d ]{60,80}", "([a-z]{3,9}-abcd-[0-9]{2} ){6,9}", "(yes|no), it is( not)? so")


def in_form(plain):
    """Requests with a grammar and without, and their answers without drafts."""
    forms = [
        SamplingParams(
            temperature=i % 2,
            seed=i,
            max_tokens=50,
            structured_outputs=StructuredOutputsParams(regex=FORMS[i // 2]),
        )
        for i in range(6)
    ]
    prompts, params = [PROMPTS[0], *PROMPTS], [PARAMS[0], *forms]
    plain.reset_prefix_cache()
    return prompts, params, plain.generate(prompts, params, use_tqdm=False)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("is_wrong", [MIXED, pytest.param(RIGHT, marks=pytest.mark.sweep)])
def test_drafts_change_no_token_in_a_form(llm, plain, script, is_wrong):
    """The states of these rows go on in the second program."""
    prompts, params, wanted = in_form(plain)
    learn(script, wanted, is_wrong, params)
    llm.reset_prefix_cache()
    got, drafted, accepted, preempted = counted(
        llm, lambda: llm.generate(prompts, params, use_tqdm=False)
    )
    assert tokens(got) == tokens(wanted)
    assert preempted > 0 and 0 < accepted < drafted
    # From a snapshot, whose states drafts have passed by.
    got, _, accepted, _ = counted(
        llm, lambda: llm.generate(prompts[1:3], params[1:3], use_tqdm=False)
    )
    assert tokens(got) == tokens(wanted[1:3])
    assert accepted > 10


def test_a_draft_model_drafts_in_a_form(model, plain, tmp_path):
    prompts, params, wanted = in_form(plain)
    draft = make_tiny_checkpoint(tmp_path)
    spec = {"method": "draft_model", "model": str(draft)} | EVERY
    llm = LLM(str(model), **BASE | {"enforce_eager": False}, speculative_config=spec)
    got, drafted, _, preempted = counted(llm, lambda: llm.generate(prompts, params, use_tqdm=False))
    assert tokens(got) == tokens(wanted)
    assert drafted > 0 and preempted > 0
    assert stats(llm).num_compiles_after_warmup == 0
