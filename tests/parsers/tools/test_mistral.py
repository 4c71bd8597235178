import pytest

FORMAT = "mistral"


@pytest.mark.parametrize("space", ["", " "])
def test_an_array_of_calls(parse, space):
    parsed = parse(
        f"Hm.[TOOL_CALLS]{space}"
        '[{"name": "f", "arguments": {"a": [1]}}, {"arguments": {}, "name": "g", "id": "x"}]'
    )

    assert parsed.content == "Hm."
    assert parsed.calls == [("f", '{"a": [1]}'), ("g", "{}")]


def test_a_name_and_arguments(parse):
    parsed = parse('[TOOL_CALLS]f{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g-2 {}')

    assert parsed.content == ""
    assert parsed.calls == [("f", '{"a": "[TOOL_CALLS]"}'), ("g-2", "{}")]


def test_a_marker_before_the_arguments(parse):
    parsed = parse('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}')

    assert parsed.calls == [("f", '{"a": 1}'), ("g", "{}")]


def test_the_model_may_give_an_id(parse):
    parsed = parse("[TOOL_CALLS]f[CALL_ID]9Ae3bDc2F[ARGS]{}[TOOL_CALLS]g[CALL_ID]short[ARGS]{}")

    assert parsed.calls == [("f", "{}"), ("g", "{}")]
    assert parsed.ids[0] == "9Ae3bDc2F"
    assert parsed.ids[1] != "short"


def test_ids_are_nine_letters_or_digits(parse):
    (call_id,) = parse("[TOOL_CALLS]f{}").ids

    assert len(call_id) == 9
    assert call_id.isalnum()
    assert call_id.isascii()


def test_a_single_object(parse):
    assert parse('[TOOL_CALLS]{"name": "f", "arguments": {}}').calls == [("f", "{}")]


def test_what_is_no_call_is_content(parse):
    for text in [
        "[TOOL_CALLS]",
        "[TOOL_CALLS]some words",
        "[TOOL_CALLS][1]",
        "[TOOL_CALLS][",
        "[x]",
    ]:
        parsed = parse(text)
        assert parsed.content == text
        assert parsed.calls == []


def test_a_call_without_end_ends_where_the_next_begins(parse):
    parsed = parse('[TOOL_CALLS]f{"a": {[TOOL_CALLS]g{}')

    assert parsed.calls == [("f", '{"a": {'), ("g", "{}")]


def test_an_array_without_end(parse):
    parsed = parse('[TOOL_CALLS][{"name": "f", "arguments": {}}, oops')

    assert parsed.calls == [("f", "{}")]
    assert parsed.content == ", oops"
