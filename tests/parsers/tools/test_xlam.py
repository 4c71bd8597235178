import pytest

FORMAT = "xlam"
CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


@pytest.mark.parametrize(
    "text",
    [
        f"[{CALL}, {CALL}]",
        f"[TOOL_CALLS] [{CALL}, {CALL}]",
        f"<tool_call>[{CALL}, {CALL}]</tool_call>",
        f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>",
    ],
)
def test_calls_have_a_marker_or_none(parse, text):
    assert parse(text).calls == [("get_weather", '{"city": "Paris"}')] * 2
    assert parse(text).content == ""


@pytest.mark.parametrize("text", ["[1, 2]", "[a](b)", f"See [{CALL}]", "[]"])
def test_other_brackets_are_content(parse, text):
    assert parse(text).content == text
    assert parse(text).calls == []
