"""Formats that announce JSON by a marker: a call, or an array of calls."""

import pytest

from jaxllm.parsers.deltas import ArgumentsDelta, ContentDelta
from jaxllm.parsers.tools.registry import make_tool_parser

FORMS = {
    "granite": "<|tool_call|>{}",
    "granite-20b-fc": "<function_call> {}",
    "hermes": "<tool_call>\n{}\n</tool_call>",
    "hunyuan_a13b": "<tool_calls>{}</tool_calls>",
    "internlm": "<|action_start|><|plugin|>\n{}<|action_end|>",
    "phi4_mini_json": "functools{}",
}
each_form = pytest.mark.parametrize(("name", "form"), FORMS.items())

FIRST = '{"name": "f", "arguments": {"a": {"b": [1, "]}</tool_calls> ["]}}}'
SECOND = '{"name": "g", "parameters": {"ü": "☀️"}}'
CALLS = [("f", '{"a": {"b": [1, "]}</tool_calls> ["]}}'), ("g", '{"ü": "☀️"}')]


def written(form, json):
    return form.replace("{}", json)


@each_form
def test_an_array_of_calls_between_texts(name, form, parse_split):
    text = f"I look. {written(form, f'[{FIRST}, {SECOND}]')} Done."

    parsed = parse_split(name, text)

    assert parsed.calls == CALLS
    assert parsed.content == "I look.  Done."


@each_form
def test_several_announced_calls(name, form, parse_split):
    parsed = parse_split(name, written(form, FIRST) + "\n" + written(form, SECOND))

    assert parsed.calls == CALLS
    assert parsed.content == ""


@each_form
@pytest.mark.parametrize(
    "wrong", ["[]", "[1]", "words", '[{"name": ""}]', '{"arguments": {}}', "["]
)
def test_what_is_no_call_is_content(name, form, wrong, parse_split):
    text = written(form, wrong)

    parsed = parse_split(name, text)

    assert parsed.content == text
    assert parsed.calls == []


@each_form
def test_calls_in_front_of_something_else_count(name, form, parse_split):
    parsed = parse_split(name, written(form, f"[{FIRST}, {{}}, oops]"))

    assert parsed.calls == CALLS[:1]
    assert parsed.content == written(form, ", {}, oops]").removeprefix(form.split("{}")[0])


@each_form
def test_arguments_stream(name, form):
    parser = make_tool_parser(name)
    parser.feed(form.split("{}")[0] + '[{"name": "f", "arguments": ')

    assert parser.feed('{"a')[-1] == ArgumentsDelta(0, '{"a')
    assert parser.feed('": 1}') == [ArgumentsDelta(0, '": 1}')]


@pytest.mark.parametrize("name", ["granite", "granite-20b-fc"])
def test_a_broken_call_ends_at_the_next_marker(name, parse_split):
    form = FORMS[name]
    broken = written(form, '{"name": "f", "arguments": {"a": [')

    parsed = parse_split(name, broken + written(form, SECOND))

    assert parsed.calls == [("f", '{"a": ['), CALLS[1]]
    assert parsed.content == ""


def test_granite_31_has_another_marker(parse_split):
    parsed = parse_split("granite", f"<tool_call>[{FIRST}, {SECOND}]")

    assert (parsed.content, parsed.calls) == ("", CALLS)


def test_granite_may_begin_with_the_array(parse_split):
    parsed = parse_split("granite", f"\n[{FIRST}, {SECOND}]\nDone.")

    assert (parsed.content, parsed.calls) == ("\nDone.", CALLS)


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        "[",
        '[{"title": "x", "name": "f", "arguments": {}}]',
        '[{"name": "f"}]',
        f"See [{FIRST}]",
        FIRST,
    ],
)
def test_other_json_of_granite_is_content(text, parse_split):
    parsed = parse_split("granite", text)

    assert (parsed.content, parsed.calls) == (text, [])


def test_phi_may_use_its_special_tokens(parse_split):
    parsed = parse_split("phi4_mini_json", f"<|tool_call|>[{FIRST},{SECOND}]<|/tool_call|>Done.")

    assert (parsed.content, parsed.calls) == ("Done.", CALLS)


def test_phi_may_write_about_functools():
    parser = make_tool_parser("phi4_mini_json")

    assert parser.feed("Use func") == [ContentDelta("Use ")]
    assert parser.feed("tools.partial") == [ContentDelta("functools.partial")]
    assert parser.feed(" or functools[1]") == [ContentDelta(" or functools[1]")]


def test_command_names_the_keys_otherwise(parse_split):
    parsed = parse_split(
        "cohere_command3",
        'Hm.<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}'
        ',\n    {"tool_name": "g", "tool_call_id": "1"}\n]<|END_ACTION|>',
    )

    assert parsed.content == "Hm."
    assert parsed.calls == [("f", '{"a": 1}'), ("g", "{}")]
    assert not set(parsed.ids) & {"0", "1"}
    text = f"<|START_ACTION|>[{FIRST}]<|END_ACTION|>"
    assert parse_split("cohere_command3", text).content == text
