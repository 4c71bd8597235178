FORMAT = "kimi_k2"


def call(name, number, arguments):
    return (
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>"
    )


def section(*calls):
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def test_several_calls_keep_the_ids_that_the_template_expects(parse):
    parsed = parse("I look." + section(call("a.b", 3, '{"x": [1]}'), call("get_time", 4, "{}")))

    assert parsed.content == "I look."
    assert parsed.calls == [("a.b", '{"x": [1]}'), ("get_time", "{}")]
    assert parsed.ids == ["functions.a.b:3", "functions.get_time:4"]


def test_an_id_without_a_number_is_a_name(parse):
    text = "<|tool_call_begin|> f <|tool_call_argument_begin|> {} <|tool_call_end|>"

    assert parse(section(text)).calls == [("f", "{}")]


def test_what_is_no_call_is_content(parse):
    for text in (section(), section("f"), "<|tool_calls_section_begin|><|tool_call_begin|>f:0{}"):
        assert parse(text).content == text
        assert parse(text).calls == []
