import re

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
from jaxllm.parsers.reasoning.tagged import TaggedReasoning

USER = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
OPENED = USER + "<think>\n"

TAGGED = {
    name: tags
    for name, tags in REASONING_FORMATS.items()
    if isinstance(tags, TaggedReasoning) and not tags.is_content
}
each_format = pytest.mark.parametrize("name", TAGGED)
each_prompt = pytest.mark.parametrize("end", ["", "{open}\n", "{open}\n\n{close}\n\n", "{answer}"])
PARTS = [
    "{open}", "{close}", "{answer}", "{end}", "\n", " ", "a thought", "<tool_call>", "<", "é☀️",
    "Here is my ", "Here's my response:", "<|START_ACTION|>",
]  # fmt: skip


def tags_of(name):
    tags = TAGGED[name]
    answer, end = tags.content_tags or ("", "")
    return {"open": tags.open_tags[0], "close": tags.close_tags[0], "answer": answer, "end": end}


def parse(name, text, prompt="", **kwargs):
    answer = make_reasoning_parser(name, prompt, **kwargs).parse(text)
    assert answer.tool_calls == []
    return answer.reasoning, answer.content


@each_format
@each_prompt
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_split_gives_the_same_and_drops_only_tags_and_space(name, end, data):
    check_splits(name, end, data)


@pytest.mark.sweep
@each_format
@each_prompt
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_split_of_more_texts_gives_the_same(name, end, data):
    check_splits(name, end, data)


def check_splits(name, end, data):
    prompt = USER + end.format(**tags_of(name))
    tags = TAGGED[name]
    form = [*tags.open_tags, *tags.close_tags, *(tags.content_tags or ())]
    dropped = re.compile("|".join([*map(re.escape, form), r"\s"]))
    parts = [part.format(**tags_of(name)) for part in PARTS]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=10)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    split = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    whole = make_reasoning_parser(name, prompt).parse(text)

    kept = whole.reasoning + whole.content
    assert whole.tool_calls == []
    assert dropped.sub("", kept) == dropped.sub("", text)
    for pieces in (split, text):
        parser = make_reasoning_parser(name, prompt)
        deltas = [delta for piece in pieces for delta in parser.feed(piece)]
        assert add_up(deltas + parser.finish()) == whole


@each_format
def test_the_model_opens_and_closes(name):
    text = "{open}\nBecause\n\nof <b>.\n{close}\n\nSo.\n".format(**tags_of(name))

    assert parse(name, text, USER) == ("Because\n\nof <b>.", "So.\n")


@each_format
@pytest.mark.parametrize("opening", ["", "{open}\n"])
def test_the_template_has_opened(name, opening):
    prompt = USER + "{open}\n".format(**tags_of(name))
    text = f"{opening}Because.\n{{close}}\n\nSo.".format(**tags_of(name))

    assert parse(name, text, prompt) == ("Because.", "So.")


@each_format
def test_the_template_has_closed(name):
    prompt = USER + "{open}\n\n{close}\n\n".format(**tags_of(name))
    text = "So. {close}".format(**tags_of(name))

    assert parse(name, text, prompt) == ("", text)


@each_format
def test_thinking_is_turned_off(name):
    text = "\nSo. {open}".format(**tags_of(name))

    assert parse(name, text, USER, enable_thinking=False) == ("", text)


@each_format
def test_a_model_may_open_its_reasoning_although_thinking_is_turned_off(name):
    for reasoning in ("", "Because."):
        text = f"{{open}}\n{reasoning}\n{{close}}\n\nSo.".format(**tags_of(name))
        assert parse(name, text, USER, enable_thinking=False) == (reasoning, "So.")


@each_format
def test_reasoning_that_is_cut_off(name):
    close = tags_of(name)["close"][:-2]

    assert parse(name, f"{tags_of(name)['open']}\nBecause\n{close}", USER) == (
        f"Because\n{close}",
        "",
    )


WITH_CONTENT_TAGS = [name for name, tags in TAGGED.items() if tags.content_tags]


@pytest.mark.parametrize("name", WITH_CONTENT_TAGS)
@pytest.mark.parametrize("line", ["\n", ""])
def test_tags_around_the_content_are_dropped(name, line):
    tags = tags_of(name)
    text = line.join(["{open}", "Because.", "{close}", "{answer}", "So <b>.", "{end}", ""])
    text = text.format(**tags)

    assert parse(name, text, USER) == ("Because.", "So <b>.")
    without = text[text.index(tags["answer"]) :]
    assert parse(name, f"\n{without}", USER + tags["open"] + tags["close"]) == ("", "So <b>.")
    assert parse(name, without, USER, enable_thinking=False) == ("", "So <b>.")
    without = without.removeprefix(tags["answer"])
    assert parse(name, without, USER + tags["answer"]) == ("", "So <b>.")


@pytest.mark.parametrize("name", WITH_CONTENT_TAGS)
def test_text_outside_of_the_tags_of_the_content_is_content(name):
    tags = tags_of(name)

    text = "{open}Because.{close}{answer}So.{end}\n<tool_call>".format(**tags)
    assert parse(name, text, USER) == ("Because.", "So.<tool_call>")
    text = "{open}Because.{close}<tool_call> {answer}".format(**tags)
    assert parse(name, text, USER) == ("Because.", "<tool_call> {answer}".format(**tags))
    text = "{open}Because.{close}\n{answer}\nSo\n".format(**tags)
    assert parse(name, text, USER) == ("Because.", "So\n")


@pytest.mark.parametrize("thinks", ["Here is", "Here's"])
@pytest.mark.parametrize("answers", ["Here is", "Here's"])
def test_granite_has_two_wordings(thinks, answers):
    text = f"{thinks} my thought process:\nHere is why.\n\n{answers} my response:\nSo."

    assert parse("granite", text, USER) == ("Here is why.", "So.")
    assert parse("granite", "Here is my cat.", USER) == ("", "Here is my cat.")


def test_command_may_act_without_closing_its_thinking():
    text = "<|START_THINKING|>Because.<|START_ACTION|>[]<|END_ACTION|>"
    assert parse("cohere_command3", text) == ("Because.", "<|START_ACTION|>[]<|END_ACTION|>")
    text = "<|START_THINKING|>Because.\n<|START_RESPONSE|>So.<|END_RESPONSE|>"
    assert parse("cohere_command3", text) == ("Because.", "So.")


def test_seed_remarks_on_its_budget_are_reasoning():
    text = "Because.<seed:cot_budget_reflect>2</seed:cot_budget_reflect>\n</seed:think>So."

    assert parse("seed_oss", text) == (
        "Because.<seed:cot_budget_reflect>2</seed:cot_budget_reflect>",
        "So.",
    )


@pytest.mark.parametrize("name", ["ernie45", "olmo3", "seed_oss", "deepseek_r1"])
def test_models_that_always_think_begin_with_it(name):
    close = tags_of(name)["close"]

    assert parse(name, f"Because.\n{close}\nSo.", USER) == ("Because.", "So.")
    assert parse(name, "Because") == ("Because", "")


@pytest.mark.parametrize("name", ["cohere_command3", "gemma4", "glm45", "granite", "hunyuan_a13b"])
def test_other_models_think_only_after_the_opening_tag(name):
    text = " So. {open} {close}".format(**tags_of(name))

    assert parse(name, text, USER) == ("", text)


def test_qwen3_does_not_think_unless_the_tag_is_open():
    assert parse("qwen3", " So. <think>", USER) == ("", " So. <think>")


def test_qwen3_may_call_a_tool_without_closing_the_tag():
    assert parse("qwen3", "Because.\n<tool_call>{}", OPENED) == ("Because.", "<tool_call>{}")


def test_deepseek_r1_thinks_from_the_beginning():
    assert parse("deepseek_r1", "Because. <tool_call>\n</think>\nSo.", USER) == (
        "Because. <tool_call>",
        "So.",
    )


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
    with pytest.raises(ValidationError, match="reasoning_parser='r2': use one of .*deepseek_r1"):
        find_reasoning_format("r2")


@pytest.mark.parametrize("size", [1, 3, 99])
@pytest.mark.parametrize(
    ("prompt", "text", "content"),
    [
        (OPENED, "Because.\n</think>\n\nSo.", "<think>Because.\n</think>\n\nSo."),
        (OPENED, "\n<think>Because.</think>So.", "\n<think>Because.</think>So."),
        (OPENED, " <thin", "<think> <thin"),
        (USER, "Because.</think>So.", "<think>Because.</think>So."),
        (f"{OPENED}</think>", "So.", "So."),
    ],
)
def test_reasoning_may_be_left_in_the_content(prompt, text, content, size):
    parser = make_reasoning_parser("minimax_m2_append_think", prompt)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    answer = add_up(deltas + parser.finish())
    assert (answer.reasoning, answer.content) == ("", content)
