"""Tokens that a grammar forces are computed together, and are those that are sampled one by one."""

import json

import jsonschema
import pytest

from jaxllm.structured_output import host
from jaxllm.testing import make_tiny_checkpoint
from tests.grammars import GRAMMARS, json_grammar, make_core, prompt, request, same, serve
from tests.profile import TINY

CHECKED = TINY | {"check_invariants": True}
FEW_BLOCKS = {"block_size": 4, "num_gpu_blocks_override": 34, "enable_prefix_caching": False}
LONG_KEYS = {
    "type": "object",
    "properties": {
        "an identification of the thing": {"enum": ["red", "green"]},
        "whether it is there or not": {"type": "boolean"},
        "how many of them there are": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": [
        "an identification of the thing",
        "whether it is there or not",
        "how many of them there are",
    ],
    "additionalProperties": False,
}
FORMS = [
    json_grammar(LONG_KEYS),
    "start: /(yes|no), because of [a-c]{2} and so on/",
    'start: "the first one" | "the second one" | "another"',
    GRAMMARS[2],
]


def crowd(**params):
    """Requests at temperature 0 and 1, of whose forms much is forced."""
    return [
        request(
            str(i),
            prompt(i, length),
            FORMS[i // 2],
            **({"temperature": i % 2, "max_tokens": 110 - length} | params),
        )
        for i, length in enumerate((5, 40, 17, 9, 33, 1, 16, 30))
    ]


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


def one_by_one(core, requests):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "may_skip", lambda params: False)
        answers = serve(core, requests)
    core.scheduler.reset_prefix_cache()
    return answers


@pytest.fixture(scope="module")
def expected(core):
    return one_by_one(core, crowd())


def test_they_are_those_that_are_sampled(core, expected, tokenizer):
    same(serve(core, crowd()), expected)
    for key in ("0", "1"):
        jsonschema.validate(json.loads(tokenizer.decode(expected[key].tokens)), LONG_KEYS)
    assert {answer.finish for answer in expected.values()} == {"stop"}


def test_one_has_them_alone(core, expected):
    for one in crowd():
        same(serve(core, [one]), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False},
        {"long_prefill_token_threshold": 3},  # runs are cut
        FEW_BLOCKS,
    ],
    ids=["no overlap", "cut", "preempted"],
)
def test_how_steps_are_planned_does_not_change_them(model, expected, options):
    core = make_core(model, **CHECKED | options)
    same(serve(core, crowd()), expected)
    assert (options is not FEW_BLOCKS) or core.stats().num_preemptions > 0
    core.shutdown()


def test_a_run_is_one_row(model, tokenizer):
    core = make_core(model, **CHECKED | {"async_scheduling": False})
    one = request("x", prompt(0, 4), json_grammar(LONG_KEYS), max_tokens=120)
    [answer] = serve(core, [one]).values()
    text = tokenizer.decode(answer.tokens)
    jsonschema.validate(json.loads(text), LONG_KEYS)
    # All keys and the words behind their first letter are forced; of a number each digit is free,
    # and its end.
    num_free = 3 + len(text.rpartition(":")[2])
    assert core.stats().num_steps <= 3 + num_free < len(answer.tokens) / 4
    core.shutdown()


def test_ends_within_a_run_are_the_same(core, tokenizer):
    last = tokenizer.token_to_id(":")
    for params in ({"max_tokens": 9}, {"max_tokens": 1}, {"eos": (last,)}):
        expected = one_by_one(core, crowd(**params))
        same(serve(core, crowd(**params)), expected)
        core.scheduler.reset_prefix_cache()
    assert last in {answer.tokens[-1] for answer in expected.values()}


def test_who_asks_for_logprobs_or_penalties_has_them_sampled(core):
    its = {"logprobs": 2, "repetition_penalty": 1.3}
    for name, value in its.items():
        expected = one_by_one(core, crowd(**{name: value}))
        same(serve(core, crowd(**{name: value})), expected)
        core.scheduler.reset_prefix_cache()
