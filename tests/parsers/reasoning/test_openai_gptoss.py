"""Answers of gpt-oss are messages in channels."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.parsers.answer_format import AnswerFormat
from jaxllm.parsers.deltas import ContentDelta, ReasoningDelta, ToolCallDelta, add_up
from jaxllm.parsers.reasoning.base import Start
from jaxllm.parsers.reasoning.openai_gptoss import OPENAI_GPTOSS
from jaxllm.parsers.reasoning.registry import make_reasoning_parser

PROMPT = "<|start|>user<|message|>Weather?<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Look it up.<|end|>"
NEXT = "<|start|>assistant"
CALL = (
    '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
)
FINAL = "<|channel|>final<|message|>It rains.<|return|>"
TOOLS = [{"type": "function", "function": {"name": "look"}}]
PARTS = [
    NEXT, "<|start|>", "<|channel|>", "analysis", "final", "commentary", "<|message|>", "<|end|>",
    "<|call|>", "<|return|>", " to=functions.look", " to=python", " ", "text", "<", "<|", "\n", "é",
]  # fmt: skip


def parser(prompt=PROMPT, **options):
    return AnswerFormat.of("openai_gptoss", "openai").parser(prompt, TOOLS, **options)


def parse(text, prompt=PROMPT):
    answer = parser(prompt).parse(text)
    calls = [(call.name, call.arguments) for call in answer.tool_calls]
    return answer.reasoning, answer.content, calls


def test_channels_are_reasoning_content_and_calls():
    look = [("look", '{"city": "Paris"}')]
    preamble = "<|channel|>commentary<|message|>Wait.<|end|>"

    assert parse(THOUGHT + NEXT + FINAL) == ("Look it up.", "It rains.", [])
    assert parse(THOUGHT + NEXT + CALL) == ("Look it up.", "", look)
    assert parse(FINAL) == ("", "It rains.", [])
    assert parse(CALL) == ("", "", look)
    assert parse(preamble + NEXT + CALL) == ("", "Wait.", look)
    assert parse(CALL + NEXT + CALL) == ("", "", look * 2)


def test_stop_tokens_are_not_needed():
    assert parse(THOUGHT + NEXT + CALL.removesuffix("<|call|>"))[2] == [
        ("look", '{"city": "Paris"}')
    ]
    assert parse(FINAL.removesuffix("<|return|>"))[1] == "It rains."


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.look<|channel|>commentary json<|message|>",
        "<|start|>assistant to=functions.look<|channel|>commentary <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.look<|message|>",
        "<|channel|>analysis to=functions.look code<|message|>",
    ],
)
def test_a_recipient_may_stand_anywhere_in_a_header(header):
    assert parse(f'{header}{{"a": 1}}<|call|>') == ("", "", [("look", '{"a": 1}')])


def test_messages_of_one_kind_are_on_lines_of_their_own():
    preamble = "<|channel|>commentary<|message|>Wait.<|end|>"

    text = NEXT.join([THOUGHT, preamble, THOUGHT, FINAL])

    assert parse(text) == ("Look it up.\nLook it up.", "Wait.\nIt rains.", [])


def test_a_call_of_an_imagined_tool_is_reasoning():
    text = "<|channel|>commentary to=python code<|message|>1 + 1<|call|>"

    assert parse(text) == ("1 + 1", "", [])


def test_the_prompt_may_have_begun_a_message():
    analysis, final = (
        f"{PROMPT}<|channel|>analysis<|message|>",
        f"{PROMPT}<|channel|>final<|message|>",
    )

    assert parse(f"Hm.<|end|>{NEXT}{FINAL}", analysis) == ("Hm.", "It rains.", [])
    assert parse("It rains.<|return|>", f"{final}Now: ") == ("", "It rains.", [])
    assert OPENAI_GPTOSS.start(PROMPT, True) is Start.EITHER
    assert OPENAI_GPTOSS.start("plain text", True) is Start.EITHER
    assert OPENAI_GPTOSS.start(f"{analysis}a<|end|>{NEXT}", True) is Start.EITHER
    assert OPENAI_GPTOSS.start("<|start|>user<|message|>Hm", True) is Start.EITHER


def test_an_answer_may_be_cut_off_after_any_token():
    # Marks are single tokens, which nothing cuts.
    tokens = re.findall(r"<\|\w+\|>|.", THOUGHT + NEXT + CALL)
    for end in range(len(tokens)):
        reasoning, content, calls = parse("".join(tokens[:end]))
        assert content == ""
        assert "Look it up.".startswith(reasoning)
        assert all('{"city": "Paris"}'.startswith(arguments) for _, arguments in calls)


def test_what_is_no_message_is_content():
    for text in ("So.", "<|channel|>final So it is.", "a <|channel|>b<|end|> c", "to= x"):
        assert parse(text, "plain text") == ("", text, [])


def test_deltas_come_as_soon_as_they_are_certain():
    stream = parser()

    assert stream.feed("<|channel|>analysis<|message|>Lo") == [ReasoningDelta("Lo")]
    assert stream.feed("ok") == [ReasoningDelta("ok")]
    assert stream.feed("<|end|><|start|>assistant<|channel|>commentary to=fun") == []
    (begin,) = stream.feed("ctions.look <|constrain|>json<|message|>")
    assert isinstance(begin, ToolCallDelta) and begin.name == "look"
    (arguments,) = stream.feed('{"ci')
    assert arguments.text == '{"ci'
    assert stream.feed("<|call|><|start|>assistant<|channel|>final<|message|>So") == [
        ContentDelta("So")
    ]


def test_reasoning_tokens_are_counted():
    stream = parser(text_of=chr)
    text = THOUGHT + NEXT + FINAL

    stream.feed(text, list(map(ord, text)))

    assert stream.num_reasoning_tokens == len("<|channel|>analysis<|message|>Look it up.")


def test_without_tools_a_call_is_content_as_it_was_written():
    answer = AnswerFormat.of("openai_gptoss", "openai").parser(PROMPT).parse(THOUGHT + NEXT + CALL)

    assert (answer.reasoning, answer.content) == ("Look it up.", NEXT + CALL)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_split_gives_the_same(data):
    text = "".join(data.draw(st.lists(st.sampled_from(PARTS), max_size=15)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    split = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    for pieces in (split, text):
        stream = make_reasoning_parser("openai_gptoss", PROMPT)
        deltas = [delta for piece in pieces for delta in stream.feed(piece)]
        whole = make_reasoning_parser("openai_gptoss", PROMPT).parse(text)
        assert add_up(deltas + stream.finish()) == whole


def test_arguments_are_passed_on_unchanged():
    arguments = json.dumps({"text": 'a "b" é\n', "nested": [{}]}, ensure_ascii=False)
    text = f"<|channel|>commentary to=functions.look<|message|>{arguments}<|call|>"

    assert parse(text)[2] == [("look", arguments)]
