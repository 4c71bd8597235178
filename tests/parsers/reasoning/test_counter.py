"""Tokens of reasoning are counted, in whatever pieces they come."""

import pytest

from jaxllm.parsers.reasoning.counter import ReasoningCounter
from jaxllm.parsers.reasoning.registry import make_reasoning_parser


def count(text, name="qwen3", size=None, **options):
    """Of an answer with a token for each letter, so many at once."""
    counter = ReasoningCounter(make_reasoning_parser(name, **options), chr)
    size = size or len(text) or 1
    for first in range(0, len(text), size):
        counter.feed(list(map(ord, text[first : first + size])))
    counter.finish()
    return counter.num_tokens


@pytest.mark.parametrize("size", [1, 3, None])
def test_reasoning_counts_with_its_opening_tag(size):
    assert count("<think>abc\n</think>\n\nYes", size=size) == len("<think>abc")
    assert count("abc</think>Yes", "deepseek_r1", size=size) == len("abc")
    assert count("abc</think>Yes", prompt="?<think>\n", size=size) == len("abc")


@pytest.mark.parametrize("size", [1, 3, None])
def test_an_answer_that_was_cut_off_in_its_reasoning_is_all_reasoning(size):
    assert count("<think>abc</thi", size=size) == len("<think>abc</thi")
    assert count("<think>abc\n", size=size) == len("<think>abc\n")


def test_an_answer_without_reasoning_has_none():
    for text in ("Yes", "<think>\n\n</think>\n\nYes", "<thin", ""):
        assert count(text) == 0
    assert count("abc</think>Yes", "deepseek_r1", enable_thinking=False) == 0
