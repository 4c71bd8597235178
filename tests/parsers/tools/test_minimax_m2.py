import json

import pytest

FORMAT = "minimax_m2"


def invoke(name, **parameters):
    lines = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in parameters.items())
    return f'<invoke name="{name}">\n{lines}</invoke>\n'


def calls(*invokes):
    return f"<minimax:tool_call>\n{''.join(invokes)}</minimax:tool_call>"


def test_one_block_has_several_calls_with_typed_values(parse):
    parsed = parse(
        "I look.\n" + calls(invoke("get_weather", city="7", days="7"), invoke("get_time", zone="x"))
    )

    assert parsed.content == "I look.\n"
    assert parsed.calls == [
        ("get_weather", '{"city": "7", "days": 7}'),
        ("get_time", '{"zone": "x"}'),
    ]


@pytest.mark.parametrize("value", ["\n", "two\nlines\n", "", "a > b < c", '"> quoted', "☀️"])
def test_a_string_comes_through_to_the_letter(parse, value):
    ((_, arguments),) = parse(calls(invoke("get_weather", city=value))).calls

    assert json.loads(arguments) == {"city": value}


def test_tags_of_other_models_are_content(parse):
    for text in ("<invoke name=get_weather>", "<tool_call><function=f></function></tool_call>"):
        assert parse(text).content == text
        assert parse(text).calls == []
