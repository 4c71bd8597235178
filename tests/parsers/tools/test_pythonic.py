import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.parsers.deltas import ArgumentsDelta
from jaxllm.parsers.tools.registry import make_tool_parser

FORMAT = "pythonic"

LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=10,
)  # fmt: skip


def test_several_calls(parse):
    parsed = parse("[get_weather(city='Paris', days=3), get_time(), ]")

    assert parsed.content == ""
    assert parsed.calls == [("get_weather", '{"city": "Paris", "days": 3}'), ("get_time", "{}")]


@given(value=LITERALS)
def test_a_literal_becomes_the_same_in_json(value):
    answer = make_tool_parser(FORMAT).parse(f"[f(a={value!r})]")

    (call,) = answer.tool_calls
    assert json.loads(call.arguments) == {"a": value}


@pytest.mark.parametrize(
    "literal",
    [r"'\x41\u00e9\U0001F600\0\q\x4'", "'''it's \"so\"'''", '""', r"'\ud83d\ude00'", "'a\\\nb'"],
)
def test_escapes_and_quotes(parse, literal):
    parsed = parse(f"[f(a={literal})]")

    expected = "😀" if "ud83d" in literal else value_of(literal)
    assert json.loads(parsed.calls[0][1]) == {"a": expected}


def value_of(literal):
    # Python refuses an escape that is too short; it stays as it is written.
    return ast.literal_eval(literal.replace(r"\q", r"\\q").replace(r"\x4'", r"\\x4'"))


def test_tuples_keys_and_trailing_commas(parse):
    parsed = parse("[f(a=(1, (2,), ()), b={1: 'x', None: [],}, c=true,)]")

    assert json.loads(parsed.calls[0][1]) == {
        "a": [1, [2], []],
        "b": {"1": "x", "null": []},
        "c": True,
    }


def test_after_a_tag_calls_may_follow_text(parse):
    parsed = parse("Sure.<|python_start|>[f()]<|python_end|>")

    assert parsed.content == "Sure."
    assert parsed.calls == [("f", "{}")]


def test_other_text_is_content(parse):
    for text in ["[1, 2]", "[a](b)", "[sin(x)]", "See [f(a=1)]", "[f(1)]", "[f", "f(a=1)", "[]"]:
        parsed = parse(text)
        assert parsed.content == text
        assert parsed.calls == []


def test_arguments_stream(stream):
    parser = stream("[f(")

    assert parser.feed("a='x")[-1] == ArgumentsDelta(0, '{"a": "x')
    assert parser.feed("y") == [ArgumentsDelta(0, "y")]
    assert parser.feed("', b=12") == [ArgumentsDelta(0, '", "b": ')]
    assert parser.feed(")") == [ArgumentsDelta(0, "12}")]


@pytest.mark.parametrize("wrong", ["[1 2]", "{1}", "{[]: 1}", "x", "f()", "[", "'a' 'b'", "{1:}"])
def test_what_is_no_literal_ends_the_call(parse, wrong):
    parsed = parse(f"[f(a={wrong})] end")

    ((name, arguments),) = parsed.calls
    assert name == "f"
    with pytest.raises(ValueError):
        json.loads(arguments)


def test_what_follows_a_broken_argument_is_content(parse):
    for rest in ["oops", "oops)]", "(1)", " b: 2)]"]:
        parsed = parse(f"[f(a=1, {rest} end")
        assert parsed.calls == [("f", '{"a": 1')]
        assert parsed.content.lstrip() == f"{rest} end".lstrip()


def test_lfm2_has_other_tags(parse_split):
    parsed = parse_split("lfm2", "Sure.<|tool_call_start|>[f(a=1), g()]<|tool_call_end|> Done.")

    assert parsed.content == "Sure. Done."
    assert parsed.calls == [("f", '{"a": 1}'), ("g", "{}")]
