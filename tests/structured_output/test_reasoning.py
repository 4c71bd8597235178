"""The form begins after the end of the reasoning."""

import pytest

from jaxllm import StructuredOutputsParams
from jaxllm.parsers.answer_format import AnswerFormat
from jaxllm.parsers.reasoning.base import Start
from jaxllm.parsers.reasoning.registry import REASONING_FORMATS
from jaxllm.parsers.reasoning.tagged import TaggedReasoning
from tests.structured_output.walks import door, fits, vocabulary, walk

TAGGED = {
    name: tags
    for name, tags in REASONING_FORMATS.items()
    if isinstance(tags, TaggedReasoning) and not tags.is_content
}
FORM = StructuredOutputsParams(regex="[0-9]{1,3}")


def form_after(name, prompt="", enable_thinking=True, *tokens):
    tags = REASONING_FORMATS[name]
    start = tags.start(prompt, enable_thinking)
    return door(*tokens).grammar(FORM, (tags, start))


@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("name", TAGGED)
def test_the_parser_finds_the_form_as_content(name, are_tokens):
    tags = TAGGED[name]
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
    assert deepseek.start("hello", True) is Start.REASONING
    assert deepseek.start("hello", False) is Start.EITHER
    assert deepseek.start("hello", None) is Start.EITHER
    assert deepseek.start("hello <think>\n", None) is Start.REASONING
    assert qwen.start("hello", True) is Start.EITHER
    assert qwen.start("<think>\n\n</think>\n\n", True) is Start.CONTENT
    assert ernie.start("<response>\n", True) is Start.TAGGED_CONTENT


def test_a_form_may_hold_from_the_beginning():
    tags = REASONING_FORMATS["qwen3"]
    form = door(enable_in_reasoning=True).grammar(FORM, (tags, Start.REASONING))
    assert fits(form, "12") and not fits(form, "hm</think>12")


HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>")
ASSISTANT = "<|start|>assistant"


@pytest.mark.parametrize("tokens", [(), HARMONY])
def test_the_form_is_in_the_final_channel(tokens):
    vocab = vocabulary(*tokens)
    thought, final = "<|channel|>analysis<|message|>12?<|end|>", "<|channel|>final<|message|>"

    def allows(answer, prompt=ASSISTANT):
        return fits(form_after("openai_gptoss", prompt, True, *tokens), answer, vocab)

    assert allows(f"{final}7") and allows("<|channel|>final <|constrain|>json<|message|>7")
    assert allows(f"{thought}{ASSISTANT}{final}7")
    assert allows(f"{thought}{ASSISTANT}{thought}{ASSISTANT}{final}7")
    assert not allows("7") and not allows(thought) and not allows(f"{final}x")
    assert not allows(f"{thought}{final}7")
    assert allows("7", f"{ASSISTANT}{final}")
    inside = f"{ASSISTANT}<|channel|>analysis<|message|>"
    assert allows(f"Hm<|end|>{ASSISTANT}{final}7", inside) and not allows("7", inside)


@pytest.mark.parametrize("tokens", [(), HARMONY])
def test_the_parser_finds_the_form_in_the_final_channel(tokens):
    vocab = vocabulary(*tokens)
    form = form_after("openai_gptoss", ASSISTANT, True, *tokens)
    answers = [walk(form, seed, vocab, most=90) for seed in range(8)]
    whole = [answer for answer in answers if answer is not None]
    for answer in whole:
        parsed = AnswerFormat.of("openai_gptoss").parser(ASSISTANT).parse(answer)
        assert parsed.content.isdigit() and len(parsed.content) <= 3, answer
    assert whole
