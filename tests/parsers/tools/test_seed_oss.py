import json

import pytest

from jaxllm.parsers.deltas import ArgumentsDelta

FORMAT = "seed_oss"


def call(*parameters):
    lines = "".join(f"<parameter={name}>{value}</parameter>\n" for name, value in parameters)
    return f"<seed:tool_call>\n<function=get_weather>\n{lines}</function>\n</seed:tool_call>"


def test_several_calls_with_typed_values(parse):
    parsed = parse(f"I look.\n{call(('city', 'Genève'), ('days', '3'))}\n{call(('exact', 'true'))}")

    assert parsed.content == "I look.\n"
    assert parsed.calls == [
        ("get_weather", '{"city": "Genève", "days": 3}'),
        ("get_weather", '{"exact": true}'),
    ]


@pytest.mark.parametrize(
    "value", ["\n", "two\nlines\n", "\n\nx", "", "<tool_call> </tool_call>", '{"a": [1]}', "☀️"]
)
def test_a_string_comes_through_with_all_its_line_breaks(parse, value):
    ((_, arguments),) = parse(call(("city", value), ("note", value))).calls

    assert json.loads(arguments) == {"city": value, "note": value}


def test_arguments_stream(stream):
    parser = stream("<seed:tool_call>\n<function=get_weather>\n")

    assert parser.feed("<parameter=city>\nA") == [ArgumentsDelta(0, '"city": "\\nA')]
    assert parser.feed("\n</parameter>") == [ArgumentsDelta(0, "\\n")]
    assert parser.feed("\n</function>") == [ArgumentsDelta(0, '"}')]


def test_what_is_no_call_is_content(parse):
    for text in ["<seed:tool_call>hello</seed:tool_call>", "<function=>", "<tool_call>{}"]:
        assert parse(text).content == text
        assert parse(text).calls == []
