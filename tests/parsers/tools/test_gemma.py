"""Gemma 4 and FunctionGemma write the same with other tags and quotes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.parsers.deltas import ArgumentsDelta
from jaxllm.parsers.tools.registry import make_tool_parser

TAGS = {
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
}
each_name = pytest.mark.parametrize("name", TAGS)

KEYS = st.from_regex(r"[A-Za-z_]\w{0,5}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner),
    max_leaves=10,
)  # fmt: skip


def written(value, quotes):
    """As the chat templates write a value."""
    match value:
        case str():
            return quotes + value + quotes
        case list():
            return f"[{','.join(written(one, quotes) for one in value)}]"
        case dict():
            pairs = (f"{key}:{written(one, quotes)}" for key, one in value.items())
            return f"{{{','.join(pairs)}}}"
    return json.dumps(value)


def call(name, function, arguments):
    begin, end, quotes = TAGS[name]
    return f"{begin}call:{function}{written(arguments, quotes)}{end}"


@each_name
@settings(deadline=None)
@given(arguments=st.dictionaries(KEYS, VALUES, max_size=4))
def test_arguments_become_the_same_in_json(name, arguments):
    answer = make_tool_parser(name).parse(call(name, "f", arguments))

    (parsed,) = answer.tool_calls
    assert json.loads(parsed.arguments) == arguments
    assert answer.content == ""


@each_name
def test_several_calls_between_texts(name, parse_split):
    text = f"I look.{call(name, 'f', {'a': '}, b: ['})}{call(name, 'g.h', {})} Done."

    parsed = parse_split(name, text)

    assert parsed.content == "I look. Done."
    assert parsed.calls == [("f", '{"a": "}, b: ["}'), ("g.h", "{}")]


@each_name
def test_other_notations_of_values(name, parse_split):
    begin, end, quotes = TAGS[name]
    key = f"{quotes}the key{quotes}"
    text = f"{begin}call:f{{ a : New York, {key}: None,\n b: [True , x<y, 03], }}{end}"

    ((_, arguments),) = parse_split(name, text).calls

    assert json.loads(arguments) == {
        "a": "New York",
        "the key": None,
        "b": [True, "x<y", "03"],
    }


@each_name
def test_strings_of_json(name, parse_split):
    begin, end, _ = TAGS[name]
    arguments = '{"a": "x, \\"y\\"}", "b": [1, "2"]}'

    assert parse_split(name, f"{begin}call:f{arguments}{end}").calls == [("f", arguments)]


@each_name
def test_arguments_stream(name):
    begin, end, quotes = TAGS[name]
    parser = make_tool_parser(name)
    parser.feed(f"{begin}call:f{{")

    assert parser.feed(f"a:{quotes}x") == [ArgumentsDelta(0, '"a": "x')]
    assert parser.feed('"\n') == [ArgumentsDelta(0, '\\"\\n')]
    assert parser.feed(f"{quotes},b:1") == [ArgumentsDelta(0, '", "b": ')]
    assert parser.feed("}") == [ArgumentsDelta(0, "1}")]
    assert parser.feed(end) == []


@each_name
@pytest.mark.parametrize("wrong", ["a", "a:", "a:1 b", "[a]:1", "a:1]", ":1"])
def test_what_breaks_the_form_ends_the_call(name, wrong, parse_split):
    begin, end, _ = TAGS[name]
    parsed = parse_split(name, f"{begin}call:f{{{wrong}{end} Done.")

    ((_, arguments),) = parsed.calls
    assert parsed.content.endswith(" Done.")
    with pytest.raises(ValueError):
        json.loads(arguments)


@each_name
def test_what_is_no_call_is_content(name, parse_split):
    begin, end, _ = TAGS[name]
    for body in ["", "call:", "call:f", "call:f()", "hello", '{"name": "f"}']:
        parsed = parse_split(name, begin + body + end)
        assert parsed.content == begin + body + end
        assert parsed.calls == []
