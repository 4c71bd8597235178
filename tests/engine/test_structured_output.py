"""Answers keep the form of their request's grammar, whatever else runs, and nothing else changes.

A row under a grammar samples in a second program. So all that a request's tokens may not depend on
is tried again here: overlap, neighbours, chunks, preemption, samples of one prompt, parameters.
"""

import itertools

import msgspec
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.executor.launch import make_executors
from jaxllm.executor.uniproc import UniProcExecutor
from jaxllm.messages import Add, Sibling
from jaxllm.plan.buckets import Bucket
from jaxllm.programs.compile import Programs
from jaxllm.programs.declare import LateKey
from jaxllm.testing import make_tiny_checkpoint
from tests.grammars import (
    GRAMMARS,
    SCHEMAS,
    Answer,
    crowd,
    is_valid,
    json_grammar,
    make_core,
    prompt,
    request,
    same,
    serve,
)
from tests.profile import TINY
from tests.stand_in import StandIn

CHECKED = TINY | {"check_invariants": True}
FEW_BLOCKS = {"block_size": 4, "num_gpu_blocks_override": 34, "enable_prefix_caching": False}
# Compiles, and runs out of items in a row after some tokens.
AMBIGUOUS = "start: n0\n" + "\n".join(
    f"n{i}: " + " | ".join(f"n{j} n{(i + j) % 4}" for j in range(4)) + ' | "a"' for i in range(4)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def core(model):
    core = make_core(model, **CHECKED)
    yield core
    core.shutdown()


@pytest.fixture(autouse=True)
def cold(core):
    core.scheduler.reset_prefix_cache()


@pytest.fixture(scope="module")
def tokenizer(model):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(f"{model}/tokenizer.json")


@pytest.fixture(scope="module")
def expected(core):
    return serve(core, crowd())


class TestForm:
    def test_random_answers_at_temperature_1_keep_it(self, core, tokenizer):
        requests = [
            request(f"{i}", prompt(i, 3 + i % 30), GRAMMARS[i % len(GRAMMARS)], max_tokens=60)
            for i in range(240)
        ]
        answers = serve(core, requests)
        ended = [i for i in range(240) if answers[str(i)].finish == "stop"]
        texts = [tokenizer.decode(answers[str(i)].tokens) for i in ended]
        assert all(
            is_valid(t, SCHEMAS[i % len(SCHEMAS)]) for i, t in zip(ended, texts, strict=True)
        )
        assert len(ended) > 220, "most of them should come to an end"
        assert len(set(texts)) > 100, "they should be random"
        # The others were cut: all their tokens are the beginning of something.
        assert {a.finish for a in answers.values()} <= {"stop", "length"}

    def test_the_end_of_the_grammar_is_the_end_of_the_request(self, core, tokenizer):
        answers = serve(
            core,
            [
                # Neither waits for an end of sequence, nor for min_tokens, which cannot be reached.
                request("plain", prompt(0, 4), 'start: "ab" "c"'),
                request("ignores", prompt(0, 4), 'start: "ab" "c"', ignore_eos=True),
                request("more", prompt(0, 4), 'start: "ab" "c"', min_tokens=20),
                request("just", prompt(0, 4), 'start: "a"', max_tokens=1),
                # It may end after each letter, and must after five.
                request("open", prompt(0, 4), "start: /[ab]{1,5}/", ignore_eos=True, temperature=2),
            ],
        )
        for name in ("plain", "ignores", "more"):
            assert tokenizer.decode(answers[name].tokens) == "abc"
        assert tokenizer.decode(answers["just"].tokens) == "a"
        assert {a.finish for a in answers.values()} == {"stop"}
        assert {a.stop_reason for a in answers.values()} == {None}
        text = tokenizer.decode(answers["open"].tokens)
        assert 1 <= len(text) <= 5 and set(text) <= {"a", "b"}

    def test_no_other_parameter_leads_out_of_it(self, core, tokenizer):
        [a, b, c] = (tokenizer.token_to_id(letter) for letter in "abc")
        answers = serve(
            core,
            [
                request("ids", prompt(1, 4), "start: /[ab]{3}/", allowed_token_ids=[a, c]),
                request("no ids", prompt(1, 4), "start: /[ab]{3}/", allowed_token_ids=[c]),
                request("bias", prompt(1, 4), "start: /[ab]{3}/", logit_bias={c: 100, b: -100}),
                msgspec.structs.replace(
                    request("words", prompt(1, 4), "start: /a{3}/", bad_words=["a"]),
                    bad_word_ids=[[a]],
                ),
            ],
        )
        texts = {name: tokenizer.decode(answer.tokens) for name, answer in answers.items()}
        assert texts["ids"] == texts["bias"] == texts["words"] == "aaa"
        assert len(texts["no ids"]) == 3 and set(texts["no ids"]) <= {"a", "b"}


class TestEqualities:
    def test_alone_is_as_in_a_crowd(self, core, expected):
        for one in crowd():
            core.scheduler.reset_prefix_cache()
            same(serve(core, [one]), expected)

    def test_without_overlap_is_as_with_it(self, model, expected):
        core = make_core(model, **CHECKED, async_scheduling=False)
        same(serve(core, crowd()), expected)
        core.shutdown()

    def test_preempted_is_as_undisturbed(self, model, expected):
        core = make_core(model, **CHECKED | FEW_BLOCKS)
        same(serve(core, crowd()), expected)
        assert core.stats().num_preemptions > 0
        core.shutdown()

    def test_rows_without_a_grammar_get_what_they_get_without_the_others(self, core, expected):
        plain = [one for one in crowd() if one.grammar is None]
        same(serve(core, plain), expected)

    def test_samples_of_one_prompt_each_have_their_own_form(self, core):
        first = request("0", prompt(3, 20), GRAMMARS[0], seed=5)
        siblings = Add(first, [Sibling("1", 6), Sibling("2", 7)]).requests()
        answers = serve(core, siblings)
        assert len({tuple(answer.tokens) for answer in answers.values()}) == 3
        for seed, key in ((5, "0"), (6, "1"), (7, "2")):
            core.scheduler.reset_prefix_cache()
            same(serve(core, [request(key, prompt(3, 20), GRAMMARS[0], seed=seed)]), answers)

    def test_a_grammar_that_allows_everything_changes_nothing(self, core, tokenizer):
        """The second program samples as the first one does: seeds, penalties, logprobs."""
        # Tokens of whole characters may stand anywhere.
        whole = [token for token in range(3, 384) if "\ufffd" not in tokenizer.decode([token])]
        params = {
            "repetition_penalty": 1.3, "presence_penalty": 0.2, "logprobs": 4, "top_p": 0.95,
            "allowed_token_ids": whole,
        }  # fmt: skip
        free = "start: /(.|\\n)*/"
        wanted = serve(core, [request("x", prompt(4, 30), **params)])
        same(serve(core, [request("x", prompt(4, 30), free, **params)]), wanted)

    def test_logprobs_are_those_before_the_mask(self, core):
        [free] = serve(core, [request("x", prompt(5, 8), max_tokens=1, logprobs=3)]).values()
        [kept] = serve(core, [request("x", prompt(5, 8), 'start: "{"', logprobs=3)]).values()
        assert kept.tokens != free.tokens
        best = slice(1, None)
        assert kept.logprobs[0].token_ids[best] == free.logprobs[0].token_ids[best]
        assert kept.logprobs[0].logprobs[best] == pytest.approx(free.logprobs[0].logprobs[best])
        assert kept.logprobs[0].rank > 3


class TestPrograms:
    @pytest.fixture
    def programs_of(self, monkeypatch):
        """The programs that each step dispatches."""
        steps = []
        get, execute = Programs.__getitem__, UniProcExecutor.execute

        def note(programs, key):
            if isinstance(key, Bucket | LateKey) and steps:
                steps[-1].append(key)
            return get(programs, key)

        def begin(executor, schedule):
            steps.append([])
            return execute(executor, schedule)

        monkeypatch.setattr(Programs, "__getitem__", note)
        monkeypatch.setattr(UniProcExecutor, "execute", begin)
        return steps

    def test_a_step_without_such_rows_is_one_program(self, core, programs_of):
        # The one with a grammar has a prompt of two chunks, and ends long before the others.
        long = [request(str(i), prompt(i, 4), max_tokens=40, ignore_eos=True) for i in range(2)]
        serve(core, [*long, request("g", prompt(3, 50), 'start: "abc"')])
        late = [keys for keys in programs_of if len(keys) == 2]
        assert 1 <= len(late) <= 4 and len(programs_of) >= 40
        for bucket, key in late:
            assert key == LateKey(bucket.num_rows)
        plain = [keys for keys in programs_of if keys not in late]
        assert all(len(keys) == 1 and isinstance(keys[0], Bucket) for keys in plain)

    def test_nothing_is_compiled_after_the_start(self, model):
        core = make_core(model, **CHECKED | {"enforce_eager": False})
        serve(core, crowd())
        assert core.stats().num_compiles_after_warmup == 0
        assert core.stats().mask_s > 0
        core.shutdown()


class TestFailures:
    def test_what_is_no_grammar_ends_its_own_request_only(self, core, expected):
        bad = request("bad", prompt(9, 12), "no grammar")
        answers = serve(core, [bad, *crowd()])
        its = answers.pop("bad")
        assert its.finish == "error" and its.error.startswith("structured_outputs: ")
        assert "Expected token" in its.error and its.tokens == []
        same(answers, expected)

    def test_one_that_needs_too_much_work_ends_its_own_request_only(
        self, core, expected, tokenizer
    ):
        its = {"max_tokens": 60, "logit_bias": {tokenizer.token_to_id("a"): 100}}
        answers = serve(core, [request("bad", prompt(9, 12), AMBIGUOUS, **its), *crowd()])
        its = answers.pop("bad")
        assert its.finish == "error" and "max is 500" in its.error
        assert 3 < len(its.tokens) < 60
        same(answers, expected)

    def test_without_a_vocabulary_its_requests_end(self, tmp_path):
        model = make_tiny_checkpoint(tmp_path)
        core = make_core(str(model), **TINY)
        (tmp_path / "tokenizer.json").unlink()
        answers = serve(core, [request("g", [5, 6], GRAMMARS[0]), request("x", [5, 6])])
        assert answers["g"].finish == "error" and "no tokenizer.json" in answers["g"].error
        assert answers["x"].finish in ("stop", "length")
        core.shutdown()

    @pytest.mark.parametrize("fails_at", [0, 3])
    def test_when_the_second_program_fails_its_step_has_failed(self, core, monkeypatch, fails_at):
        """The requests of the step end, and so do those that went on from it; others start over."""
        count = itertools.count()
        sample = core.executor.sample

        def fail_once(masks):
            if next(count) == fails_at:
                raise RuntimeError("the device is unwell")
            sample(masks)

        monkeypatch.setattr(core.executor, "sample", fail_once, raising=True)
        answers = serve(core, crowd())
        lost = [answer for answer in answers.values() if answer.finish == "error"]
        assert 0 < len(lost) < len(answers)
        assert all("the device is unwell" in answer.error for answer in lost)
        monkeypatch.undo()
        whole = serve(core, crowd())
        same({k: a for k, a in answers.items() if a.finish != "error"}, whole)

    def test_requests_may_be_aborted_at_any_time(self, core, expected):
        for num_steps in range(1, 6):
            for one in crowd():
                core.add_request(one)
            for _ in range(num_steps):
                core.step()
            core.abort_requests(["0", "2", "6"])
            while core.has_work():
                core.step()
        core.scheduler.reset_prefix_cache()
        same(serve(core, crowd()), expected)


def test_replicas_do_not_wait_for_each_others_tokens(model, expected):
    """A step that awaits its masks is left alone while the one before it runs."""
    config = EngineConfig.create(model=model, **CHECKED)
    [executor] = make_executors(config)
    device = StandIn(executor)
    core = EngineCore(config, device)
    [one] = [one for one in crowd() if one.request_id == "2"]
    core.add_request(one)
    while not core.in_flight:
        core.step(wait=False)
    answer = Answer()
    while core.has_work():
        device.is_busy = True
        for _ in range(3):
            assert core.step(wait=False) == []
        num_steps, device.is_busy = device.num_steps, False
        for output in core.step(wait=False):
            answer.add(output)
        assert device.num_steps == num_steps
    same({"2": answer}, expected)
    core.shutdown()


def test_what_compiles_slowly_does_not_hold_up_the_others(core):
    large = json_grammar({"enum": [f"word {i}" for i in range(3000)]})
    core.add_request(request("x", prompt(0, 4), max_tokens=30, ignore_eos=True))
    core.add_request(request("slow", prompt(1, 4), large))
    num_waiting, ended = [], {}
    while core.has_work():
        for output in core.step():
            if output.finish_reason is not None:
                ended[output.request_id] = str(output.finish_reason)
        num_waiting.append(core.stats().num_requests_deferred)
    assert ended == {"x": "length", "slow": "stop"}
    assert num_waiting[0] == 1 and num_waiting[-1] == 0
