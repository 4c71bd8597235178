"""Several calls in one answer, and what is particular to the formats of Step 3 and Hy3."""

import pytest

from tests.parsers.tools.conftest import parse_whole

STEP3_CALL = (
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">\n'
    '<steptml:parameter name="city">{city}</steptml:parameter>\n'
    '<steptml:parameter name="days">{days}</steptml:parameter>\n'
    "</steptml:invoke><｜tool_call_end｜>\n"
)
HY_CALL = (
    "<tool_call{word}>get_weather<tool_sep{word}>\n<arg_key{word}>city</arg_key{word}>\n"
    "<arg_value{word}>{city}</arg_value{word}>\n</tool_call{word}>\n"
)


def test_step3_makes_several_calls():
    calls = STEP3_CALL.format(city="Paris", days=3) + STEP3_CALL.format(city="a < b", days="x")
    parsed = parse_whole("step3", f"Wait.\n<｜tool_calls_begin｜>\n{calls}<｜tool_calls_end｜>\n")

    assert parsed.content == "Wait.\n"
    assert parsed.calls == [
        ("get_weather", '{"city": "Paris", "days": 3}'),
        ("get_weather", '{"city": "a < b", "days": "x"}'),
    ]


def test_step3_may_forget_to_close_a_function():
    text = STEP3_CALL.format(city="Paris", days=3).replace("</steptml:invoke>", "")
    parsed = parse_whole("step3", f"<｜tool_calls_begin｜>{text}<｜tool_calls_end｜>Done.")

    assert parsed.calls == [("get_weather", '{"city": "Paris", "days": 3}')]
    assert parsed.content == "Done."


@pytest.mark.parametrize("word", ["", ":opensource"])
def test_the_tags_of_hy3_may_end_in_a_word(word):
    calls = HY_CALL.format(word=word, city="Paris") + HY_CALL.format(word=word, city="Rome")
    parsed = parse_whole("hy_v3", f"<tool_calls{word}>\n{calls}</tool_calls{word}>")

    assert parsed.calls == [
        ("get_weather", '{"city": "Paris"}'),
        ("get_weather", '{"city": "Rome"}'),
    ]
    assert parsed.content == ""


def test_hy3_may_call_without_arguments():
    parsed = parse_whole("hy_v3", "<tool_calls><tool_call>now<tool_sep></tool_call></tool_calls>")

    assert parsed.calls == [("now", "{}")]


def test_a_name_without_its_end_is_no_call():
    text = "<tool_calls><tool_call>now</tool_call></tool_calls>"

    assert parse_whole("hy_v3", text).content == text
