"""From the names of parsers to a whole answer, as a script uses them."""

import dataclasses
import re
from pathlib import Path

import pytest

import jaxllm.parsers
from jaxllm import ValidationError
from jaxllm.parsers.answer_format import AnswerFormat
from jaxllm.parsers.options import ParserOptions
from jaxllm.parsers.reasoning.registry import REASONING_FORMATS
from jaxllm.parsers.tools.registry import TOOL_FORMATS

TOOL = {"type": "function", "function": {"name": "look"}}
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def test_an_answer_is_taken_apart():
    parser = AnswerFormat.of("qwen3", "hermes").parser("?", [TOOL], text_of=chr)
    text = f"<think>Hm.</think>Wait.{CALL}"
    (*_, call) = parser.feed(text, list(map(ord, text))) + parser.finish()
    assert (call.index, call.text) == (0, "{}")
    assert parser.num_reasoning_tokens == len("<think>Hm.")


def test_the_prompt_says_whether_reasoning_has_begun():
    answer_format = AnswerFormat.of("qwen3")
    assert answer_format.parser("<think>\n").parse("Hm.</think>Yes").reasoning == "Hm."
    assert answer_format.parser("?").parse("Hm.</think>Yes").reasoning == ""
    closed = answer_format.parser("<think>\n", enable_thinking=False)
    assert closed.parse("Yes").content == "Yes"


def test_calls_are_looked_for_only_if_there_are_tools():
    answer_format = AnswerFormat.of(tool_call_parser="hermes")
    assert answer_format.parser("?").parse(CALL).content == CALL
    assert answer_format.parser("?").num_reasoning_tokens is None
    (call,) = answer_format.parser("?", [TOOL]).parse(CALL).tool_calls
    assert (call.name, call.arguments) == ("look", "{}")


@pytest.mark.parametrize(
    ("reasoning", "tools", "with_tools", "expected"),
    [
        (None, None, True, False),
        ("qwen3", None, True, True),
        (None, "mistral", True, True),
        (None, "mistral", False, False),
    ],
)
def test_special_tokens_are_needed_if_either_format_needs_them(
    reasoning, tools, with_tools, expected
):
    assert AnswerFormat.of(reasoning, tools).needs_special_tokens(with_tools) is expected


@pytest.mark.parametrize("tool", [{"name": "look"}, {"function": {"name": 1}}, "look", None])
def test_what_is_no_tool_is_refused(tool):
    with pytest.raises(ValidationError, match="a tool has the form"):
        AnswerFormat.of(None, "hermes").parser("?", [tool])


@pytest.mark.parametrize("names", [("no-such", None), (None, "no-such")])
def test_an_unknown_format_is_refused(names):
    with pytest.raises(ValidationError, match="use one of"):
        AnswerFormat.of(*names)


def test_the_page_and_the_help_have_all_names():
    page = (Path(jaxllm.parsers.__file__).parent / "README.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")]
    for column, formats in ((1, TOOL_FORMATS), (2, REASONING_FORMATS)):
        named = {name for row in rows[1:] for name in re.findall("`([^`]+)`", row[column])}
        assert named == set(formats)
    for option in dataclasses.fields(ParserOptions):
        names = {"tool_call_parser": TOOL_FORMATS, "reasoning_parser": REASONING_FORMATS}
        for name in names.get(option.name, ()):
            assert name in option.metadata["help"]
