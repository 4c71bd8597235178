import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import ValidationError
from jaxllm.parsers.deltas import ContentDelta, ReasoningDelta, add_up
from jaxllm.parsers.reasoning.registry import (
    REASONING_FORMATS,
    find_reasoning_format,
    make_reasoning_parser,
)

USER = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
OPENED = USER + "<think>\n"
CLOSED = USER + "<think>\n\n</think>\n\n"

each_format = pytest.mark.parametrize("name", REASONING_FORMATS)
PARTS = ["<think>", "</think>", "<tool_call>", "\n", " ", "a thought", "<", "</thin", "é☀️"]


def parse(name, text, prompt="", **kwargs):
    answer = make_reasoning_parser(name, prompt, **kwargs).parse(text)
    assert answer.tool_calls == []
    return answer.reasoning, answer.content


@each_format
@pytest.mark.parametrize("prompt", ["", USER, OPENED, CLOSED])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_split_gives_the_same(name, prompt, data):
    text = "".join(data.draw(st.lists(st.sampled_from(PARTS), max_size=10)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    split = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    for pieces in (split, text):
        parser = make_reasoning_parser(name, prompt)
        deltas = [delta for piece in pieces for delta in parser.feed(piece)]
        assert add_up(deltas + parser.finish()) == make_reasoning_parser(name, prompt).parse(text)


@each_format
def test_the_model_opens_and_closes(name):
    text = "<think>\nBecause\n\nof <b>.\n</think>\n\nSo.\n"

    assert parse(name, text, USER) == ("Because\n\nof <b>.", "So.\n")


@each_format
@pytest.mark.parametrize("opening", ["", "<think>\n"])
def test_the_template_has_opened(name, opening):
    assert parse(name, f"{opening}Because.\n</think>\n\nSo.", OPENED) == ("Because.", "So.")


@each_format
def test_the_template_has_closed(name):
    assert parse(name, "So. </think>", CLOSED) == ("", "So. </think>")


@each_format
def test_thinking_is_turned_off(name):
    text = "\nSo. <think>"

    assert parse(name, text, USER, enable_thinking=False) == ("", text)


@each_format
def test_reasoning_that_is_cut_off(name):
    assert parse(name, "<think>\nBecause\n</thi", USER) == ("Because\n</thi", "")


def test_qwen3_does_not_think_unless_the_tag_is_open():
    assert parse("qwen3", " So. <think>", USER) == ("", " So. <think>")


def test_qwen3_may_call_a_tool_without_closing_the_tag():
    assert parse("qwen3", "Because.\n<tool_call>{}", OPENED) == ("Because.", "<tool_call>{}")


def test_deepseek_r1_thinks_from_the_beginning():
    assert parse("deepseek_r1", "Because. <tool_call>\n</think>\nSo.", USER) == (
        "Because. <tool_call>",
        "So.",
    )
    assert parse("deepseek_r1", "Because") == ("Because", "")


def test_deltas_come_as_soon_as_they_are_certain():
    parser = make_reasoning_parser("qwen3", OPENED)

    assert parser.feed("Be") == [ReasoningDelta("Be")]
    assert parser.feed("cause\n") == [ReasoningDelta("cause")]
    assert parser.feed("3 <") == [ReasoningDelta("\n3 ")]
    assert parser.feed(" 4</think") == [ReasoningDelta("< 4")]
    assert parser.feed(">\n") == []
    assert parser.feed("\nSo <") == [ContentDelta("So <")]
    assert parser.finish() == []


def test_an_unknown_format_is_refused_with_those_there_are():
    with pytest.raises(ValidationError, match="reasoning_parser='r2': use one of deepseek_r1"):
        find_reasoning_format("r2")
