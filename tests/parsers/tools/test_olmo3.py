import json

import pytest

from jaxllm.parsers.deltas import ArgumentsDelta

FORMAT = "olmo3"


def calls(*lines):
    return "\n".join(["<function_calls>", *lines, "</function_calls>"])


def test_a_call_on_each_line(parse):
    lines = ["f(a=1, b={'c': [None, true]})", 'g.h(s="x(\n)]", )', "i()"]
    parsed = parse(f"I look.\n{calls(*lines)}")

    assert parsed.content == "I look.\n"
    assert [name for name, _ in parsed.calls] == ["f", "g.h", "i"]
    assert [json.loads(arguments) for _, arguments in parsed.calls] == [
        {"a": 1, "b": {"c": [None, True]}},
        {"s": "x(\n)]"},
        {},
    ]


def test_text_after_calls_and_more_calls(parse):
    parsed = parse(f"{calls('f()')} and {calls('g()')}\n")

    assert parsed.content == " and "
    assert parsed.calls == [("f", "{}"), ("g", "{}")]


def test_the_closing_tag_may_be_missing(parse):
    assert parse("<function_calls>f()\ng()").calls == [("f", "{}"), ("g", "{}")]


@pytest.mark.parametrize("text", [calls(), calls("f(1)"), calls("words"), "f(a=1)", "[f()]"])
def test_what_is_no_call_is_content(parse, text):
    parsed = parse(text)

    assert parsed.content == text
    assert parsed.calls == []


def test_a_line_that_is_no_call(parse):
    parsed = parse(calls("f()", "words"))

    assert parsed.calls == [("f", "{}")]
    assert parsed.content == "\nwords\n</function_calls>"


def test_arguments_stream(stream):
    parser = stream("<function_calls>\nf(")

    assert parser.feed("a='x")[-1] == ArgumentsDelta(0, '{"a": "x')
    assert parser.feed("')") == [ArgumentsDelta(0, '"}')]
