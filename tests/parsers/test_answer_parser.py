import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.parsers.answer_parser import AnswerParser
from jaxllm.parsers.deltas import (
    ArgumentsDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCallDelta,
    add_up,
)
from jaxllm.parsers.reasoning.registry import make_reasoning_parser
from jaxllm.parsers.tools.registry import make_tool_parser

ANSWER = (
    '<think>\nI call {"name": "f"}.\n</think>\n\nOne moment.\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Genève"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)


def make_parser(reasoning="qwen3", tools="hermes"):
    return AnswerParser(
        make_reasoning_parser(reasoning) if reasoning else None,
        make_tool_parser(tools) if tools else None,
    )


def without_ids(answer):
    return answer.reasoning, answer.content, [(c.name, c.arguments) for c in answer.tool_calls]


def test_reasoning_then_content_then_calls():
    assert without_ids(make_parser().parse(ANSWER)) == (
        'I call {"name": "f"}.',
        "One moment.\n",
        [("get_weather", '{"city": "Genève"}'), ("get_time", "{}")],
    )


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, len(ANSWER)), max_size=40).map(sorted))
def test_every_split_gives_the_same(cuts):
    parser = make_parser()

    pieces = [ANSWER[i:j] for i, j in zip([0, *cuts], [*cuts, len(ANSWER)], strict=True)]
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]

    whole = without_ids(make_parser().parse(ANSWER))
    assert without_ids(add_up(deltas + parser.finish())) == whole


def test_one_piece_may_hold_all_kinds_of_deltas():
    parser = make_parser()

    kinds = [type(delta) for delta in parser.feed(ANSWER)]

    call = [ToolCallDelta, ArgumentsDelta]
    assert kinds == [ReasoningDelta, ContentDelta, *call, *call]
    assert parser.finish() == []


CALL = '{"name": "f", "arguments": {"a": "</think>"}}'
FAMILIES = {
    ("cohere_command3", "cohere_command3"): (
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>One moment.<|END_RESPONSE|>"
        '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": "</think>"}}]<|END_ACTION|>'
    ),
    ("ernie45", "ernie45"): f"Hm.\n</think>\n\n\nOne moment.<tool_call>\n{CALL}\n</tool_call>\n",
    ("gemma4", "gemma4"): (
        "<|channel>thought\nHm.\n<channel|>One moment."
        '<|tool_call>call:f{a:<|"|></think><|"|>}<tool_call|>'
    ),
    ("glm45", "glm45"): (
        "\n<think>Hm.</think>\nOne moment."
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value></think></arg_value>\n</tool_call>"
    ),
    ("granite", "granite"): (
        "Here is my thought process:\nHm.\n\nHere is my response:\n"
        f"One moment.<|tool_call|>[{CALL}]"
    ),
    ("hunyuan_a13b", "hunyuan_a13b"): (
        f"<think>\nHm.\n</think>\n<answer>\nOne moment.<tool_calls>[{CALL}]</tool_calls>\n</answer>"
    ),
    ("mistral", "mistral"): '[THINK]Hm.[/THINK]One moment.[TOOL_CALLS]f{"a": "</think>"}',
    ("olmo3", "olmo3"): (
        'Hm.</think>\nOne moment.<function_calls>\nf(a="</think>")\n</function_calls>'
    ),
    ("qwen3", "lfm2"): (
        "<think>Hm.</think>One moment.<|tool_call_start|>[f(a='</think>')]<|tool_call_end|>"
    ),
    ("seed_oss", "seed_oss"): (
        "<seed:think>Hm.</seed:think>One moment.<seed:tool_call>\n<function=f>\n"
        "<parameter=a></think></parameter>\n</function>\n</seed:tool_call>"
    ),
}


@pytest.mark.parametrize("names", FAMILIES)
def test_answers_of_families(names):
    parser = make_parser(*names)
    deltas = [delta for char in FAMILIES[names] for delta in parser.feed(char)]

    expected = "Hm.", "One moment.", [("f", '{"a": "</think>"}')]
    assert without_ids(add_up(deltas + parser.finish())) == expected
    assert without_ids(make_parser(*names).parse(FAMILIES[names])) == expected


def test_a_tool_call_within_reasoning_is_reasoning():
    text = "Should I <tool_call>{}</tool_call>?</think>No."

    answer = make_parser("deepseek_r1").parse(text)

    assert without_ids(answer) == ("Should I <tool_call>{}</tool_call>?", "No.", [])


def test_what_is_held_comes_out_at_the_end():
    parser = make_parser()
    parser.feed("<think>x</think>y <tool_")

    assert parser.finish() == [ContentDelta("<tool_")]


def test_either_part_may_be_missing():
    assert make_parser(tools=None).parse("<think>a</think>b<tool_call>").content == "b<tool_call>"
    assert make_parser(reasoning=None).parse("<think>a</think>b").content == "<think>a</think>b"
    assert make_parser(None, None).parse(ANSWER).content == ANSWER
    assert make_parser(None, None).feed("") == []
