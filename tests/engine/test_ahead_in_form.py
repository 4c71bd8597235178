"""Draft models and heads draft for rows with a grammar: the tokens are those without them.

The draft is the model itself, so every draft is right where the grammar takes whatever the model
says: as long as it has read what came before. One with other weights is almost always wrong.
"""

import pytest

from jaxllm import LLM, SamplingParams, StructuredOutputsParams
from jaxllm.runner.stage import Stage
from jaxllm.scheduler.schedule import NO_TOKEN
from jaxllm.structured_output import host
from jaxllm.testing import make_tiny_checkpoint
from tests.engine.test_draft_model import SHAPE
from tests.engine.test_forced_tokens import FORMS
from tests.grammars import GRAMMARS, crowd, json_grammar, make_core, prompt, request, same, serve
from tests.heads import Formulas, its_own_head, make_eagle
from tests.profile import TINY

K = 3
CHECKED = TINY | {"check_invariants": True, "block_size": 8}
# Blocks are so few that requests are preempted.
FEW = {"num_gpu_blocks_override": 18, "kv_cache_request_len": 32}
EVERY = {"num_speculative_tokens": K, "num_speculative_tokens_per_batch_size": [[1, 4, K]]}
# Little is forced.
WORDS = json_grammar({"type": "array", "items": {"enum": [True, "b", 7]}, "minItems": 12})
LETTERS = "start: /[a-z ]+/"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model"), **SHAPE))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("other"), seed=1, **SHAPE))


def letters(model):
    """The tokens of letters, of which all texts are in the form."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    texts = [(token, tokenizer.decode([token])) for token in range(tokenizer.get_vocab_size())]
    return [
        t for t, text in texts if text and all(c in "abcdefghijklmnopqrstuvwxyz " for c in text)
    ]


@pytest.fixture(scope="module")
def free(model):
    """Requests whose form refuses nothing that the model may say."""
    its = {"allowed_token_ids": letters(model), "ignore_eos": True}
    params = [
        {"temperature": 0, "max_tokens": 30},
        {"max_tokens": 33, "logprobs": 2},
        {"temperature": 0, "repetition_penalty": 1.3, "bad_words": ["the"], "max_tokens": 26},
        {"top_p": 0.9, "presence_penalty": 0.5, "max_tokens": 40},
    ]
    return [
        request(f"free {i}", prompt(30 + i, 9 + 11 * i), LETTERS, **its | one)
        for i, one in enumerate(params)
    ]


@pytest.fixture(scope="module")
def requests(free):
    """All kinds: with forms and without, of which much is forced or nothing."""
    forms = (WORDS, "start: /([a-d] ){10,16}/", 'start: ("yes" | "no" | "perhaps")+', GRAMMARS[1])
    return [*free, *crowd()] + [
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


@pytest.fixture(scope="module")
def expected(model, requests):
    core = make_core(model, **CHECKED)
    answers = serve(core, requests)
    core.shutdown()
    return answers


def drafting(model, draft, **options):
    config = {"method": "draft_model", "model": draft, **EVERY}
    return make_core(model, **CHECKED | {"speculative_config": config} | options)


@pytest.fixture(scope="module")
def core(model):
    core = drafting(model, model)
    yield core
    core.shutdown()


def counted(core, requests, expected):
    """The answers are the expected ones; returns how many drafts there were, and how many right."""
    core.scheduler.reset_prefix_cache()
    before = core.stats()
    same(serve(core, requests), expected)
    after = core.stats()
    return (
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
    )


def test_the_model_itself_drafts_only_what_is_right(core, free, expected):
    drafted, accepted = counted(core, free, expected)
    assert accepted == drafted > 60


def test_one_has_the_same_alone_and_in_a_crowd(core, requests, expected):
    _, accepted = counted(core, requests, expected)
    assert accepted > 0
    for one in requests[::4]:
        counted(core, [one], expected)


def test_it_takes_the_fewest_steps(model, free, expected):
    """One token with the prompt, four in each further step."""
    core = drafting(model, model, async_scheduling=False)
    one = free[1]
    assert counted(core, [one], expected)[1] > 0
    stats = core.stats()
    assert stats.num_steps == 1 + -(-(len(expected[one.request_id].tokens) - 1) // (K + 1))
    core.shutdown()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"async_scheduling": False}, marks=pytest.mark.sweep, id="no overlap"),
        pytest.param({"enable_prefix_caching": False} | FEW, id="preempted"),
        pytest.param({"long_prefill_token_threshold": 5}, marks=pytest.mark.sweep, id="chunks"),
    ],
)
def test_how_steps_are_planned_changes_nothing(model, requests, expected, options):
    core = drafting(model, model, **options)
    drafted, accepted = counted(core, requests, expected)
    assert 0 < accepted < drafted
    assert "kv_cache_request_len" not in options or core.stats().num_preemptions > 0
    core.shutdown()


def test_a_hostile_draft_changes_nothing_and_compiles_nothing(model, other, requests, expected):
    core = drafting(model, other, enforce_eager=False)
    its = [one for one in requests if one.grammar is not None]
    drafted, accepted = counted(core, its, expected)
    assert accepted < 0.2 * drafted
    assert core.stats().num_compiles_after_warmup == 0
    core.shutdown()


def test_what_is_forced_takes_no_more_steps_beside_wrong_drafts(model, other):
    some = [request(str(i), prompt(i, 9), form, max_tokens=100) for i, form in enumerate(FORMS)]
    steps = []
    for core in (make_core(model, **CHECKED), drafting(model, other)):
        answers = [serve(core, [one])[one.request_id].tokens for one in some]
        steps.append((answers, core.stats().num_steps))
        core.shutdown()
    assert steps[1][0] == steps[0][0]
    assert core.stats().num_draft_tokens > 0
    assert steps[1][1] <= steps[0][1]


def test_rows_without_a_form_have_no_further_program(core, requests, expected, monkeypatch):
    def never(stage, packed):
        raise AssertionError("it drafts ahead")

    monkeypatch.setattr(Stage, "draft_ahead", never)
    _, accepted = counted(core, [one for one in requests if one.grammar is None], expected)
    assert accepted > 0


def test_the_drafts_that_do_not_come_end_their_step_alone(model, free, expected, monkeypatch):
    """A program that fails is a failed step: its requests end with an error, and others go on."""
    core = drafting(model, model)
    monkeypatch.setattr(type(core.executor), "late_drafts", fails)
    [answer] = serve(core, free[:1]).values()
    assert answer.finish == "error" and answer.error is not None and "lost" in answer.error
    monkeypatch.undo()
    counted(core, free, expected)
    core.shutdown()


def fails(executor):
    raise RuntimeError("lost")


def test_the_samples_of_a_prompt_have_theirs(model):
    form = StructuredOutputsParams(regex="[a-d]{4,9}( [a-d]{4,9}){3}")
    params = SamplingParams(temperature=1, seed=5, n=3, max_tokens=40, structured_outputs=form)
    texts = []
    for its in ({}, {"speculative_config": {"method": "draft_model", "model": model, **EVERY}}):
        llm = LLM(model, **CHECKED | its)
        [output] = llm.generate([prompt(3, 20)], params, use_tqdm=False)
        texts.append([one.token_ids for one in output.outputs])
    assert texts[0] == texts[1] and len(texts[0]) == 3
    assert llm.llm_engine.stats().num_draft_tokens > 0


def test_a_head_that_is_the_model_drafts_only_what_is_right(tmp_path):
    window = 8
    model = its_own_head(tmp_path, window)
    its = {"allowed_token_ids": letters(model), "ignore_eos": True}
    forms = [
        request(
            str(i), prompt(i, 2 * window + 5 * i), LETTERS, temperature=i % 2, max_tokens=30, **its
        )
        for i in range(4)
    ] + [
        request(f"{i} of words", prompt(9 + i, 20), WORDS, temperature=i % 2, max_tokens=40)
        for i in range(2)
    ]
    options = CHECKED | {"num_gpu_blocks_override": 8, "kv_cache_request_len": 32}
    core = make_core(model, **options)
    expected = serve(core, forms)
    core.shutdown()
    core = make_core(model, **options, speculative_config={"method": "mtp", **EVERY})
    drafted, accepted = counted(core, forms[:4], expected)
    assert accepted == drafted > 60
    counted(core, forms, expected)
    core.shutdown()


@pytest.mark.parametrize("method", [pytest.param("eagle", marks=pytest.mark.sweep), "eagle3"])
def test_drafts_are_those_of_the_formulas(method, tmp_path, monkeypatch):
    """Of a random head that is to choose between three tokens, so that some drafts are right."""
    taps = {"eagle": (), "eagle3": (0, 1, 2)}[method]
    model = make_tiny_checkpoint(tmp_path / "model")
    fields = {"eagle_aux_hidden_state_layer_ids": [*taps], "draft_vocab_size": 380}
    head = make_eagle(tmp_path / "head", model, method, **(fields if taps else {}))
    seen, run = [], Stage.draft_ahead

    def run_and_look(stage, packed):
        length = int(stage._state.lengths[0])
        drafts = run(stage, packed)
        seen.append((length, drafts[0].tolist()))
        return drafts

    monkeypatch.setattr(Stage, "draft_ahead", run_and_look)
    # Nothing is forced or pauses, so that the head reads all.
    monkeypatch.setattr(host, "may_skip", lambda params: False)
    config = {"method": method, "model": str(head), "num_speculative_tokens": K}
    core = make_core(str(model), **CHECKED, async_scheduling=False, speculative_config=config)
    among = letters(str(model))[:3]
    one = request(
        "x", prompt(4, 48), LETTERS,
        temperature=0, max_tokens=60, ignore_eos=True, allowed_token_ids=among,
    )  # fmt: skip
    [answer] = serve(core, [one]).values()
    formulas = Formulas(model, head, taps)
    text = one.prompt_token_ids + answer.tokens
    for length, drafts in seen:
        made = [draft for draft in drafts if draft != NO_TOKEN]
        assert made == formulas.drafts(text[: length + 1], K, among)[: len(made)]
    assert len(seen) > 5 and 0 < core.stats().num_accepted_tokens < core.stats().num_draft_tokens
    core.shutdown()
