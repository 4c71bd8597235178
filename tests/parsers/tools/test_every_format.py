"""What holds for every format, however the text is cut and whatever stands in it."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.errors import ValidationError
from jaxllm.parsers.deltas import ContentDelta
from jaxllm.parsers.tools.registry import TOOL_FORMATS, find_tool_format, make_tool_parser

DEEPSEEK = [
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "function", "\n```json\n", "\n```",
]  # fmt: skip
XML = [
    "<function=get_weather>", "<function=", "</function>", "<parameter=city>", "<parameter=note>",
    "<parameter=days>", "<parameter=areas>", "<parameter=", "</parameter>", "\n", "null", "[1]",
]  # fmt: skip
INVOKE = [
    '<invoke name="get_weather">', '<invoke name="', "</invoke>", '<parameter name="city">',
    '<parameter name="days">', '<parameter name="areas">', '<parameter name="', "</parameter>",
    '">', "\n", "null", "[1]",
]  # fmt: skip
DSML = [
    "<｜DSML｜function_calls>", '<｜DSML｜invoke name="get_weather">', "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="city" string="true">', '<｜DSML｜parameter name="', '" string="',
    '<｜DSML｜parameter name="days" string="false">', '<｜DSML｜parameter name="areas">', 'true">',
    "</｜DSML｜parameter>", "</｜DSML｜function_calls>", "\n", "null", "[1]",
]  # fmt: skip
GLM = [
    "<tool_call>", "get_weather", "<arg_key>", "city", "note", "days", "areas", "</arg_key>",
    "<arg_value>", "</arg_value>", "</tool_call>", "\n", "null", "[1]",
]  # fmt: skip
PYTHON = ["[", "]", "f(", "city=", "'it\\'s'", "\\u00e9", "(1, 2)", "None", ")", "'", ", "]
GEMMA = ["call:", "get_weather", "{", "city:", "days:", "a:", ",", "}", "true", "[", "]", '"']
PARTS = {
    "cohere_command3": [
        "<|START_ACTION|>", "<|END_ACTION|>", '{"tool_call_id": "0", "tool_name": "f"', "[", "]",
    ],
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK,
    "deepseek_v32": DSML,
    "functiongemma": [
        "<start_function_call>", "<escape>", "<end_function_call>", *GEMMA
    ],
    "gemma4": ["<|tool_call>", '<|"|>', "<tool_call|>", *GEMMA],
    "glm45": GLM,
    "glm47": GLM,
    "granite": ["<|tool_call|>", "<tool_call>", "[", "]"],
    "granite-20b-fc": ["<function_call>"],
    "hermes": ["<tool_call>", "</tool_call>", "\n"],
    "hunyuan_a13b": ["<tool_calls>", "</tool_calls>", "[", "]"],
    "hy_v3": [
        "<tool_calls>", "</tool_calls>", "<tool_sep>", "<tool_call:opensource>",
        "<tool_sep:opensource>",
        "<arg_key:opensource>", "</arg_key:opensource>", *GLM,
    ],
    "internlm": ["<|action_start|>", "<|plugin|>", "<|action_end|>"],
    "kimi_k2": [
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.", ":0",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>",
    ],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>", *PYTHON],
    "llama3_json": ["<|python_tag|>", "; ", '"type": "function", '],
    "longcat": ["<longcat_tool_call>", "</longcat_tool_call>", "\n"],
    "minimax_m2": ["<minimax:tool_call>", "</minimax:tool_call>", *INVOKE],
    "mistral": ["[TOOL_CALLS]", "[CALL_ID]", "abcdefghi", "[ARGS]", "[", "]"],
    "olmo3": ["<function_calls>", "</function_calls>", "\n", *PYTHON],
    "openai": [
        "<|start|>assistant", "<|channel|>commentary", " to=functions.", "get_weather",
        "<|message|>", " <|constrain|>json", "<|call|>", "<|end|>", "<|channel|>final", "to=python",
    ],
    "phi4_mini_json": ["functools", "functools[", "<|tool_call|>", "<|/tool_call|>", "[", "]"],
    "pythonic": ["<|python_start|>", "<|python_end|>", *PYTHON],
    "qwen3_xml": ["<tool_call>", "</tool_call>", *XML],
    "seed_oss": ["<seed:tool_call>", "</seed:tool_call>", *XML],
    "step3": [
        "<｜tool_calls_begin｜>", "<｜tool_call_begin｜>function<｜tool_sep｜>",
        "<｜tool_call_end｜>", "<｜tool_calls_end｜>",
        '<steptml:invoke name="get_weather">', "</steptml:invoke>",
        '<steptml:parameter name="city">', '<steptml:parameter name="days">', '">', "null",
        "</steptml:parameter>", "\n", "[1]",
    ],
    "xlam": ["[TOOL_CALLS]", "<tool_call>", "</tool_call>", "[", "]"],
}  # fmt: skip
SAME = {
    "ernie45": "hermes", "granite4": "hermes", "jamba": "hunyuan_a13b",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic", "mimo": "qwen3_xml", "step3p5": "qwen3_xml",
    "nemotron_v3": "qwen3_xml", "qwen3_coder": "qwen3_xml",
}  # fmt: skip
OBJECT = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
COMMON = [
    OBJECT, '{"city": "Genève \\"☀️\\" }{"}',
    '{"name": "f"', ', "arguments": ', ', "parameters": ', '{"', '"}', "{", "}", "[", "]", '"',
    "\\", ",", " ", "\n", "text", "é☀️", "<", "3", "get_weather",
]  # fmt: skip
WHOLE = {
    "cohere_command3": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        '{"city": "Paris"}}\n]<|END_ACTION|>'
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    ),
    "functiongemma": (
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>"
    ),
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
    "glm45": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "</tool_call>"
    ),
    "glm47": (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
    ),
    "granite": f"<|tool_call|>[{OBJECT}]",
    "granite-20b-fc": f"<function_call> {OBJECT}",
    "hermes": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "hunyuan_a13b": f"<tool_calls>[\n{OBJECT}\n]</tool_calls>",
    "hy_v3": (
        "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris</arg_value>\n</tool_call>\n</tool_calls>"
    ),
    "internlm": f"<|action_start|><|plugin|>\n{OBJECT}<|action_end|>",
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "lfm2": "<|tool_call_start|>[get_weather(city='Paris')]<|tool_call_end|>",
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Paris"}}',
    "longcat": f"<longcat_tool_call>\n{OBJECT}\n</longcat_tool_call>",
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris'
        "</parameter>\n</invoke>\n</minimax:tool_call>"
    ),
    "mistral": f"[TOOL_CALLS] [{OBJECT}]",
    "olmo3": "<function_calls>\nget_weather(city='Paris')\n</function_calls>",
    "openai": (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Paris"}<|call|>'
    ),
    "phi4_mini_json": f"functools[{OBJECT}]",
    "pythonic": "[get_weather(city='Paris')]",
    "qwen3_xml": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "</function>\n</seed:tool_call>"
    ),
    "step3": (
        "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="get_weather">\n<steptml:parameter name="city">Paris'
        "</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>"
    ),
    "xlam": f"[{OBJECT}]",
}
each_format = pytest.mark.parametrize("name", WHOLE)
few, many = (
    settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    for examples in (80, 400)
)


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def draw_text(data, name):
    part = st.sampled_from([*PARTS[name], *COMMON, WHOLE[name]])
    return "".join(data.draw(st.lists(part, max_size=15)))


def draw_split(data, text):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=30)))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_every_name_is_tested_or_names_a_tested_format():
    assert set(TOOL_FORMATS) == {*WHOLE, *SAME}
    for name, other in SAME.items():
        assert TOOL_FORMATS[name] is TOOL_FORMATS[other]


@each_format
@few
@given(data=st.data())
def test_every_split_gives_the_same_and_text_without_calls_to_the_letter(name, data, parse_split):
    check_splits(name, data, parse_split)


@pytest.mark.sweep
@each_format
@many
@given(data=st.data())
def test_every_split_of_more_texts_gives_the_same(name, data, parse_split):
    check_splits(name, data, parse_split)


def check_splits(name, data, parse_split):
    text = draw_text(data, name)

    whole = parse_split(name, [text])

    if not whole.calls:
        assert whole.content == text
    assert parse_split(name, draw_split(data, text)) == whole
    assert parse_split(name, text) == whole


@each_format
def test_every_single_cut_of_a_call_gives_the_same(name, parse_split):
    text = WHOLE[name]

    for cut in range(len(text)):
        parsed = parse_split(name, [text[:cut], text[cut:]])
        assert parsed.content == ""
        assert parsed.calls == [("get_weather", '{"city": "Paris"}')]


@each_format
def test_a_call_that_is_cut_off_is_text_or_arguments_that_are_no_json(name, parse_split):
    text = WHOLE[name]
    whole = parse_split(name, [text])

    for end in range(len(text)):
        parsed = parse_split(name, [text[:end]])
        assert parsed == whole or parsed.content == ("" if parsed.calls else text[:end])
        assert parsed == whole or not any(is_json(arguments) for _, arguments in parsed.calls)


@each_format
def test_space_around_calls_is_no_content(name, parse_split):
    parsed = parse_split(name, [f"\n\n{WHOLE[name]}\n"])

    assert parsed.content == ""
    assert len(parsed.calls) == 1


@each_format
def test_text_after_a_call_is_content(name, parse_split):
    parsed = parse_split(name, [f"{WHOLE[name]}\nDone."])

    assert parsed.content == "\nDone."
    assert len(parsed.calls) == 1


@each_format
def test_content_is_not_held_back(name):
    parser = make_tool_parser(name)

    for char in "A reply, 3 < 4: {x} [y] (z) é":
        held = char in "<["  # may begin a marker; the next character tells
        assert held or parser.feed(char)[-1].text.endswith(char)


@each_format
def test_space_in_front_waits_for_what_follows(name):
    parser = make_tool_parser(name)

    assert parser.feed(" \n") == []
    assert parser.feed("A") == [ContentDelta(" \nA")]


# Models whose templates want the ids that the models wrote.
@pytest.mark.parametrize("name", sorted(WHOLE.keys() - {"kimi_k2"}))
def test_ids_of_calls_differ(name, parse_split):
    ids = [parse_split(name, [WHOLE[name]]).ids[0] for _ in range(20)]

    assert len(set(ids)) == 20
    assert all(ids)


def test_an_unknown_format_is_refused_with_those_there_are():
    with pytest.raises(ValidationError, match="tool_call_parser='hermse': use one of .*hermes"):
        find_tool_format("hermse")


NASTY = {
    "cohere_command3": ["<|START_ACTION|>", "<|START_ACTION|>[", '{"tool_name":"f",', "<|END_"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<"],
    "functiongemma": ["<start_function_call>call:f{", "a:", "<escape>", "<", "[", "{", "x", " "],
    "gemma4": ["<|tool_call>call:f{a:", "<|tool_call>call:f{", "a:[", '<|"|>', "<|", "}", ","],
    "glm45": [
        "<tool_call>f", "<arg_key>", "a", "</arg_key>", "<arg_value>", "</arg_value>",
        "</arg_value> ", "\n", "<arg_key>areas</arg_key><arg_value>",
    ],
    "granite": ["<|tool_call|>", "[", '[{"name":"f","arguments":{}},', "<tool_call>[{", "<|tool_"],
    "hermes": [
        '<tool_call>{"name":"f","arguments":', "<tool_call>", "<tool_call>{", '{"', "[", "\\n",
        " \n", "<", "a",
    ],
    "llama3_json": ['{"name":"f","arguments":{}};', '{"arguments":', '{"name":"', "["],
    "mistral": ["[TOOL_CALLS]", '[TOOL_CALLS][{"name":"f","arguments":{}},', "[TOOL_CALLS]f{"],
    "olmo3": ["<function_calls>", "<function_calls>f(a=", "f()\n", "\n", "</function_", "'"],
    "phi4_mini_json": ["functools", "functools[", "func", '[{"name":"f","arguments":{}},', "[" ],
    "pythonic": ["[f(a=", "[", '[f(a="', "\\x4", '"', "{'a':", "[f(a=1),"],
    "qwen3_xml": [
        "<function=f><parameter=areas>", "<function=f><parameter=x>", "</parameter>",
        "</parameter> ", "\n", "<parameter=", "<tool_call>", "[",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", NASTY)
def test_repetition_without_end_is_parsed(name, parse_split):
    for first in NASTY[name]:
        for part in NASTY[name]:
            text = first + part * (4000 // len(part))
            assert parse_split(name, text) == parse_split(name, [text])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hermes", "qwen3_xml"])
def test_a_long_text_by_the_character_takes_linear_time(name, parse_split):
    """If each piece were parsed together with what came before it, this would take an hour."""
    begin = WHOLE[name][: WHOLE[name].index("Paris")]
    size = 300_000

    parsed = parse_split(name, begin + "a" * size)

    assert parsed.calls == [("get_weather", '{"city": "' + "a" * size)]


def test_held_text_takes_linear_time(parse_split):
    size = 300_000

    parsed = parse_split("hermes", '<tool_call>{"arguments": ' + "[" * size)

    assert parsed.content == '<tool_call>{"arguments": ' + "[" * size
