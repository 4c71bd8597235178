import json

import pytest

from jaxllm.parsers.deltas import ArgumentsDelta

FORMAT = "glm45"


def call(*parameters, line="\n"):
    pairs = [
        f"<arg_key>{name}</arg_key>{line}<arg_value>{value}</arg_value>{line}"
        for name, value in parameters
    ]
    return f"<tool_call>get_weather{line}{''.join(pairs)}</tool_call>"


def arguments(parsed):
    assert parsed.content == ""
    assert [name for name, _ in parsed.calls] == ["get_weather"]
    return json.loads(parsed.calls[0][1])


@pytest.mark.parametrize("line", ["\n", ""])
def test_values_get_the_types_of_the_schema(parse, line):
    given = [
        ("city", "3"),
        ("days", "3"),
        ("note", "null"),
        ("areas", '["ä", "]"]'),
        ("other", "5"),
    ]

    assert arguments(parse(call(*given, line=line))) == {
        "city": "3",
        "days": 3,
        "note": None,
        "areas": ["ä", "]"],
        "other": "5",
    }


@pytest.mark.parametrize("line", ["\n", ""])
def test_several_calls_and_text(parse, line):
    parsed = parse(f"I look.\n{call(line=line)}\n{call(('days', '1'), line=line)}\nDone.")

    assert parsed.content == "I look.\n\nDone."
    assert parsed.calls == [("get_weather", "{}"), ("get_weather", '{"days": 1}')]


@pytest.mark.parametrize(
    "value",
    ["a\nb\n", "\n", "", "</arg_value> x", "<arg_key>", "<tool_call> </tool_call>", '"\\{'],
)
def test_a_string_comes_through_as_it_is(parse, value):
    assert arguments(parse(call(("city", value), ("note", value)))) == {
        "city": value,
        "note": value,
    }


def test_closing_tags_may_be_missing(parse):
    begin = "<tool_call>get_weather\n<arg_key>days"
    assert arguments(parse(f"{begin}<arg_value>1</arg_value></tool_call>")) == {"days": 1}
    assert arguments(parse(f"{begin}</arg_key><arg_value>1\n</tool_call>")) == {"days": 1}
    assert arguments(parse(f"{begin}</arg_key><arg_value>1\n<arg_key>note</arg_key><arg_value>x"
                           "</arg_value></tool_call>")) == {"days": 1, "note": "x"}  # fmt: skip
    two = f"{begin}</arg_key><arg_value>1</arg_value>\n<tool_call>f</tool_call>"
    assert parse(two).calls == [("get_weather", '{"days": 1}'), ("f", "{}")]


def test_arguments_stream(stream):
    parser = stream("<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>")

    assert parser.feed("Pa") == [ArgumentsDelta(0, "Pa")]
    assert parser.feed("ris</arg_value>") == [ArgumentsDelta(0, "ris")]
    assert parser.feed("\n</tool_call>") == [ArgumentsDelta(0, '"}')]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>get_weather",
        "<tool_call>two words</tool_call>",
        "<tool_call></tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        "<arg_key>city</arg_key>",
    ],
)
def test_what_is_no_call_is_content(parse, text):
    parsed = parse(text)

    assert parsed.content == text
    assert parsed.calls == []


def test_a_key_without_a_value_ends_the_call(parse):
    parsed = parse("<tool_call>get_weather<arg_key>city</arg_key> oops</tool_call>")

    assert parsed.calls == [("get_weather", "{")]
    assert parsed.content == "<arg_key>city</arg_key> oops</tool_call>"
