from jaxllm.parsers.deltas import ArgumentsDelta, ContentDelta, ToolCallDelta

FORMAT = "hermes"


def call(body):
    return f"<tool_call>\n{body}\n</tool_call>"


def test_text_and_several_calls(parse):
    first = call('{"name": "f", "arguments": {"a": 1}}')
    second = call('{"name": "g", "arguments": {"b": [{}]}}')

    parsed = parse(f"Let me see.\n{first}\n{second}\n")

    assert parsed.content == "Let me see.\n"
    assert parsed.calls == [("f", '{"a": 1}'), ("g", '{"b": [{}]}')]


def test_arguments_are_passed_on_to_the_letter(parse):
    arguments = '{ "q" : "a } \\" \\\\ é \\u00e9 </tool_call> <tool_call>",  "n": [1.50, {}] }'

    parsed = parse(call(f'{{"name": "f", "arguments": {arguments}}}'))

    assert parsed.calls == [("f", arguments)]
    assert parsed.content == ""


def test_deltas_come_as_soon_as_they_are_certain(stream):
    parser = stream('Hi <tool_call>\n{"name": "get_wea')

    (begun,) = parser.feed('ther"')
    assert isinstance(begun, ToolCallDelta)
    assert (begun.index, begun.name) == (0, "get_weather")
    assert parser.feed(', "arguments": ') == []
    for piece in ["{", '"city', '": ', '"Par', "is", '"', "}"]:
        assert parser.feed(piece) == [ArgumentsDelta(0, piece)]
    assert parser.feed("}\n</tool_call>\n") == []
    assert parser.feed("Done") == [ContentDelta("\nDone")]
    assert parser.finish() == []


def test_half_a_marker_is_held_and_let_go(stream):
    parser = stream("1")

    assert parser.feed(" <tool") == [ContentDelta(" ")]
    assert parser.feed("box>") == [ContentDelta("<toolbox>")]
    assert parser.feed("<tool_") == []
    assert parser.finish() == [ContentDelta("<tool_")]


def test_keys_in_any_order(parse):
    parsed = parse(call('{"id": [0, "}"], "arguments": {"a": "b"}, "name": "f", "x": null}'))

    assert parsed.calls == [("f", '{"a": "b"}')]


def test_a_call_without_arguments_has_none(parse):
    assert parse(call('{"name": "f"}')).calls == [("f", "{}")]


def test_arguments_in_a_string_are_taken_out_of_it(parse):
    parsed = parse(call(r'{"name": "f", "arguments": "{\"a\": \"\\n\\u00e9\"}"}'))

    assert parsed.calls == [("f", r'{"a": "\n\u00e9"}')]


def test_a_missing_brace_or_tag_does_not_matter(parse):
    second = call('{"name": "g", "arguments": {}}')

    assert parse('<tool_call>{"name": "f", "arguments": {}}\n' + second).calls == [
        ("f", "{}"),
        ("g", "{}"),
    ]
    assert parse('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>').calls == [
        ("f", '{"a": 1}')
    ]


def test_what_is_no_call_is_content(parse):
    for body in ["hello", "{}", '{"name": ""}', '{"name": 3}', '{"arguments": {"a": 1}}', "[1]"]:
        text = f"a {call(body)} b"
        parsed = parse(text)
        assert parsed.content == text
        assert parsed.calls == []


def test_a_call_after_one_that_is_none(parse):
    parsed = parse(call("oops") + call('{"name": "f"}'))

    assert parsed.content == call("oops")
    assert parsed.calls == [("f", "{}")]


def test_a_call_that_breaks_off_ends_there(parse):
    parsed = parse('<tool_call>{"name": "f", "arguments": {"a": [1</tool_call> and so on')

    assert parsed.calls == [("f", '{"a": [1')]
    assert parsed.content == " and so on"


def test_half_a_surrogate_pair_is_no_name(parse):
    text = call('{"name": "\\ud800"}')

    assert parse(text).content == text
