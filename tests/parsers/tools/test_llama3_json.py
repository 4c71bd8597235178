from jaxllm.parsers.deltas import ArgumentsDelta, ToolCallDelta

FORMAT = "llama3_json"


def test_parameters_or_arguments(parse):
    assert parse('{"name": "f", "parameters": {"a": 1}}').calls == [("f", '{"a": 1}')]
    assert parse('{"name": "f", "arguments": {"a": 1}}').calls == [("f", '{"a": 1}')]


def test_a_type_in_front(parse):
    parsed = parse('{"type": "function", "name": "f", "parameters": {}}')

    assert parsed.calls == [("f", "{}")]


def test_several_calls(parse):
    first, second = '{"name": "f", "parameters": {}}', '{"parameters": {"b": 2}, "name": "g"}'

    for between in ["; ", ";", "\n", ", ", ""]:
        parsed = parse(first + between + second)
        assert parsed.content == ""
        assert parsed.calls == [("f", "{}"), ("g", '{"b": 2}')]


def test_after_a_tag_a_call_may_follow_text(parse):
    parsed = parse('Sure. <|python_tag|>{"name": "f", "parameters": {}}')

    assert parsed.content == "Sure. "
    assert parsed.calls == [("f", "{}")]


def test_other_json_is_content(parse):
    for text in [
        '{"title": "x", "name": "f", "parameters": {}}',
        '{"name": "John", "age": 3}',
        '{"name": "f"}',
        'For example: {"name": "f", "parameters": {}}',
        "{}",
        '<|python_tag|>print("hello")',
        '[{"name": "f", "parameters": {}}]',
    ]:
        parsed = parse(text)
        assert parsed.content == text
        assert parsed.calls == []


def test_an_answer_in_json_is_let_go_at_the_first_key_that_calls_do_not_have(stream):
    parser = stream('{"name": "John", ')

    assert parser.feed('"age": 3')[0].text == '{"name": "John", "age": 3'
    assert parser.feed("0")[0].text == "0"


def test_the_call_begins_with_its_arguments(stream):
    parser = stream('{"name": "f", ')

    begun, arguments = parser.feed('"parameters": {"a')
    assert isinstance(begun, ToolCallDelta)
    assert arguments == ArgumentsDelta(0, '{"a')


def test_text_after_calls(parse):
    parsed = parse('{"name": "f", "parameters": {}}; That is all.')

    assert parsed.content == "; That is all."
    assert parsed.calls == [("f", "{}")]
