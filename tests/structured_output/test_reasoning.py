"""The form begins after the end of the reasoning."""

import pytest

from jaxllm import StructuredOutputsParams
from jaxllm.parsers.answer_format import AnswerFormat
from jaxllm.parsers.reasoning.base import Start, start_of
from jaxllm.parsers.reasoning.registry import REASONING_FORMATS
from tests.structured_output.walks import door, fits, vocabulary, walk

FORM = StructuredOutputsParams(regex="[0-9]{1,3}")


def form_after(name, prompt="", enable_thinking=True, *tokens):
    tags = REASONING_FORMATS[name]
    start = start_of(tags, prompt, enable_thinking)
    return door(*tokens).grammar(FORM, (tags, start))


@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_the_parser_finds_the_form_as_content(name, are_tokens):
    tags = REASONING_FORMATS[name]
    named = (*tags.open_tags, *tags.close_tags, *(tags.content_tags or ()), *tags.other_ends)
    tokens = named if are_tokens and not any(" " in one for one in named) else ()
    vocab = vocabulary(*tokens)
    prompts = ["<|im_start|>assistant\n", f"x{tags.open_tags[0]}\n", f"x{tags.close_tags[0]}\n\n"]
    if tags.content_tags:
        prompts.append(f"x{tags.content_tags[0]}")
    num_answers = 0
    for prompt in prompts:
        for enable_thinking in (True, False):
            form = form_after(name, prompt, enable_thinking, *tokens)
            answer = walk(form, len(prompt), vocab, most=60)
            if answer is None:
                continue
            parser = AnswerFormat.of(name).parser(prompt, enable_thinking=enable_thinking)
            parsed = parser.parse(answer)
            assert parsed.content.isdigit() and len(parsed.content) <= 3, (prompt, answer)
            num_answers += 1
    assert num_answers


@pytest.mark.parametrize("tokens", [(), ("<think>", "</think>", "<tool_call>")])
def test_where_the_form_begins(tokens):
    vocab = vocabulary(*tokens)

    def allows(answer, *given):
        return fits(form_after("qwen3", *given, *tokens), answer, vocab)

    inside, closed, either = ("<think>\n", True), ("<think>\n\n</think>\n\n", True), ("", True)
    assert allows("Hm, 12?</think>\n\n7", *inside) and allows("</think>7", *inside)
    assert not allows("7", *inside) and not allows("Hm</think>x", *inside)
    assert allows("7", *closed) and not allows("Hm</think>7", *closed)
    assert allows("7", *either) and allows("<think>Hm</think>7", *either)
    assert not allows("Hm</think>7", *either) and not allows("<think>7", *either)
    # What the parser takes for the end of the reasoning is none of it.
    assert not allows("Hm <tool_call></think>7", *inside)


def test_the_prompt_and_the_switch_say_where_an_answer_begins():
    deepseek, qwen, ernie = map(REASONING_FORMATS.get, ("deepseek_r1", "qwen3", "ernie45"))
    assert start_of(deepseek, "hello", True) is Start.REASONING
    assert start_of(deepseek, "hello", False) is Start.EITHER
    assert start_of(deepseek, "hello", None) is Start.EITHER
    assert start_of(deepseek, "hello <think>\n", None) is Start.REASONING
    assert start_of(qwen, "hello", True) is Start.EITHER
    assert start_of(qwen, "<think>\n\n</think>\n\n", True) is Start.CONTENT
    assert start_of(ernie, "<response>\n", True) is Start.TAGGED_CONTENT


def test_a_form_may_hold_from_the_beginning():
    tags = REASONING_FORMATS["qwen3"]
    form = door(enable_in_reasoning=True).grammar(FORM, (tags, Start.REASONING))
    assert fits(form, "12") and not fits(form, "hm</think>12")
