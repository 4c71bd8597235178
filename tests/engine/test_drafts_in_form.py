"""Rows with a grammar may have drafts, and their tokens are those that they have without."""

import pytest

from jaxllm.executor.uniproc import UniProcExecutor
from jaxllm.speculation.ngram import Ngram
from jaxllm.structured_output import host
from jaxllm.testing import make_tiny_checkpoint
from tests.drafts import MIXED, RIGHT, WRONG, told
from tests.grammars import GRAMMARS, crowd, json_grammar, make_core, prompt, request, same, serve
from tests.profile import TINY

CHECKED = TINY | {"check_invariants": True}
# Blocks are so few that requests are preempted.
DRAFTING = CHECKED | {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    "num_gpu_blocks_override": 9,
}
# Little is forced, and answers repeat themselves.
WORDS = json_grammar({"type": "array", "items": {"enum": [True, "b", 7]}, "minItems": 12})


def requests():
    """Those of `crowd`, and some at temperature 0 and 1 whose answers are long."""
    forms = (WORDS, "start: /([a-d] ){10,16}/", 'start: ("yes" | "no" | "perhaps")+', GRAMMARS[1])
    return crowd() + [
        request(
            f"{name} {temperature}",
            prompt(10 + name, 3 + 7 * name),
            form,
            temperature=temperature,
            max_tokens=50,
        )
        for name, form in enumerate(forms)
        for temperature in (0, 1)
    ]


class Repeats(Ngram):
    """A drafter of a user's: it copies what followed the last token."""

    def __init__(self, speculation=None):
        super().__init__(1, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def expected(model):
    core = make_core(model, **CHECKED)
    answers = serve(core, requests())
    core.shutdown()
    return answers


@pytest.fixture(scope="module")
def script():
    with told() as script:
        yield script


@pytest.fixture(scope="module")
def core(model, script):
    core = make_core(model, **DRAFTING)
    yield core
    core.shutdown()


@pytest.fixture
def check(script, expected):
    """Drafts of this kind give the plain answers; returns what became of them."""

    def check(core, is_wrong, some=None):
        some = some or requests()
        for one in some:
            seed = None if one.sampling_params.is_greedy else one.seed
            script.learn(one.prompt_token_ids, seed, expected[one.request_id].tokens, is_wrong)
        core.scheduler.reset_prefix_cache()
        before = core.stats()
        same(serve(core, some), expected)
        after = core.stats()
        return (
            after.num_draft_tokens - before.num_draft_tokens,
            after.num_accepted_tokens - before.num_accepted_tokens,
            after.num_steps - before.num_steps,
        )

    return check


def in_form(some):
    return [one for one in some if one.grammar is not None]


def test_right_wrong_and_mixed_drafts_change_no_token(core, check):
    its = in_form(requests())
    drafted, accepted, steps = check(core, WRONG, its)
    assert drafted > 0 and accepted == 0
    drafted, accepted, steps_if_mixed = check(core, MIXED, its)
    assert 0 < accepted < drafted
    drafted, accepted, steps_if_right = check(core, RIGHT, its)
    assert 0.8 * drafted < accepted
    assert steps_if_right < steps_if_mixed < steps


def test_others_beside_them_have_theirs_and_are_preempted(core, check):
    before = core.stats().num_preemptions
    check(core, MIXED)
    assert core.stats().num_preemptions > before


def test_one_has_the_same_alone(core, check):
    for one in in_form(requests())[::3]:
        check(core, MIXED, [one])


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False},
        {"enable_prefix_caching": False},
        {"long_prefill_token_threshold": 5},
    ],
    ids=["no overlap", "no prefixes", "chunks"],
)
def test_how_steps_are_planned_changes_nothing(model, check, options):
    core = make_core(model, **DRAFTING | options)
    _, accepted, _ = check(core, MIXED)
    assert accepted > 0
    assert core.stats().num_preemptions > 0
    core.shutdown()


def test_right_drafts_take_the_fewest_steps(model, script, expected):
    """One token with the prompt, four in each further step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "may_skip", lambda params: False)
        core = make_core(model, **DRAFTING | {"async_scheduling": False})
        [one] = [one for one in requests() if one.request_id == "1 1"]
        answer = expected[one.request_id].tokens
        script.learn(one.prompt_token_ids, one.seed, answer)
        same(serve(core, [one]), expected)
    assert core.stats().num_steps == 1 + -(-(len(answer) - 1) // 4)
    core.shutdown()


def test_nothing_is_compiled_after_the_start(model, check):
    core = make_core(model, **DRAFTING | {"enforce_eager": False})
    _, accepted, _ = check(core, MIXED)
    assert accepted > 0
    assert core.stats().num_compiles_after_warmup == 0
    core.shutdown()


def test_a_drafter_of_a_user_drafts_in_forms(model, expected):
    config = {"method": "custom_class", "model": f"{__name__}:Repeats", "num_speculative_tokens": 2}
    core = make_core(model, **CHECKED | {"speculative_config": config})
    same(serve(core, requests()), expected)
    assert core.stats().num_accepted_tokens > 0
    # It has seen the tokens that were forced, which nobody has sampled.
    core.scheduler.reset_prefix_cache()
    [one] = [one for one in crowd() if one.request_id == "2"]
    text = one.prompt_token_ids + expected["2"].tokens
    same(serve(core, [one]), expected)
    assert isinstance(core.executor, UniProcExecutor)
    [table] = [stage._state.drafter for stage in core.executor._runner._stages]
    seen = [row[: len(text)].tolist() for row in table]
    assert text[:-1] in [its[:-1] for its in seen]
    core.shutdown()
