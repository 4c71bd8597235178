import json

import pytest

from jaxllm.parsers.deltas import ArgumentsDelta, ContentDelta

FORMAT = "qwen3_xml"


def call(*parameters):
    lines = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters)
    return f"<tool_call>\n<function=get_weather>\n{lines}</function>\n</tool_call>"


def arguments(parsed):
    assert [name for name, _ in parsed.calls] == ["get_weather"]
    return json.loads(parsed.calls[0][1])


def test_values_get_the_types_of_the_schema(parse):
    parsed = parse(
        call(
            ("city", "Paris"),
            ("days", "3"),
            ("note", "None"),
            ("exact", "True"),
            ("areas", '["north", "é"]'),
            ("unknown", "5"),
        )
    )

    assert arguments(parsed) == {
        "city": "Paris",
        "days": 3,
        "note": None,
        "exact": True,
        "areas": ["north", "é"],
        "unknown": "5",
    }


def test_what_does_not_fit_its_type_stays_a_string(parse):
    parsed = parse(
        call(("days", "a few"), ("exact", "maybe"), ("areas", "[north"), ("city", "null"))
    )

    assert arguments(parsed) == {
        "days": "a few",
        "exact": "maybe",
        "areas": "[north",
        "city": "null",
    }


@pytest.mark.parametrize(
    "value",
    [
        "two\nlines\n",
        "\n\n",
        "",
        '"quoted" \\ {"a": 1}',
        "a <b> & </function> <tool_call>",
        "\t é☀️",
    ],
)
def test_a_string_comes_through_as_it_is(parse, value):
    assert arguments(parse(call(("city", value), ("note", value)))) == {
        "city": value,
        "note": value,
    }


def test_no_parameters(parse):
    assert parse(call()).calls == [("get_weather", "{}")]


def test_values_need_no_lines_of_their_own(parse):
    parsed = parse(
        "<tool_call><function=get_weather><parameter=city>Paris</parameter>"
        "<parameter=days>3</parameter></function></tool_call>"
    )

    assert arguments(parsed) == {"city": "Paris", "days": 3}


def test_strings_stream_and_others_wait_for_their_end(stream):
    parser = stream("<tool_call>\n<function=get_weather>\n")

    assert parser.feed("<parameter=city>\n") == [ArgumentsDelta(0, '"city": "')]
    assert parser.feed('a"') == [ArgumentsDelta(0, 'a\\"')]
    assert parser.feed("b\n") == [ArgumentsDelta(0, "b")]
    assert parser.feed("c\n</parameter>\n") == [ArgumentsDelta(0, "\\nc")]
    assert parser.feed("<parameter=days>\n12") == [ArgumentsDelta(0, '", "days": ')]
    assert parser.feed("\n</parameter>\n</function>\n") == [ArgumentsDelta(0, "12}")]
    assert parser.feed("</tool_call>") == []


def test_a_string_that_may_be_null_streams_once_it_is_none(stream):
    parser = stream("<tool_call>\n<function=get_weather>\n<parameter=note>\n")

    assert parser.feed("nul") == []
    assert parser.feed("lify") == [ArgumentsDelta(0, '"nullify')]


def test_several_calls_with_and_without_tags_of_their_own(parse):
    bare = "<function=get_weather>\n</function>"

    for text in [f"{call()}\n{call()}", f"<tool_call>\n{bare}\n{bare}\n</tool_call>", bare + bare]:
        parsed = parse(text)
        assert parsed.content == ""
        assert parsed.calls == [("get_weather", "{}")] * 2


@pytest.mark.parametrize(
    "text",
    [
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</function>\n</tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>",
    ],
)
def test_tags_may_be_missing(parse, text):
    parsed = parse(text)

    assert arguments(parsed) == {"city": "Paris"}
    assert parsed.content == ""


def test_a_parameter_that_is_not_closed_ends_where_the_next_begins(parse):
    parsed = parse(
        "<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</function>"
    )

    assert arguments(parsed) == {"city": "Paris", "days": 3}


def test_a_closing_tag_within_a_value_is_part_of_it(parse):
    value = "<parameter>x</parameter> and </parameter>\nmore"

    assert arguments(parse(call(("city", value)))) == {"city": value}


def test_a_broken_parameter_becomes_content_and_the_call_stays_whole(parse):
    parsed = parse(
        "<tool_call>\n<function=get_weather>\n<parameter=\n: [1]\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    )

    assert arguments(parsed) == {"days": 3}
    assert parsed.content == "<parameter=: [1]\n</parameter>\n"


def test_a_call_that_is_cut_off_has_its_arguments_as_far_as_they_came(parse):
    begin = "<tool_call>\n<function=get_weather>\n<parameter=city>\n"

    assert parse(f"{begin}Par").calls == [("get_weather", '{"city": "Par')]
    assert parse(f"{begin}Paris\n</parameter>\n").calls == [("get_weather", '{"city": "Paris"')]
    assert parse(f"{begin}Paris\n</parameter>\n<parameter=days>\n1").calls == [
        ("get_weather", '{"city": "Paris", "days": 1')
    ]


def test_what_is_no_call_is_content(stream, parse):
    for text in ["<tool_call>hello</tool_call>", "<function=>", "a <function=b c>", "<tool_call>"]:
        parsed = parse(text)
        assert parsed.content == text
        assert parsed.calls == []
    assert stream("<function").feed("al") == [ContentDelta("<functional")]
