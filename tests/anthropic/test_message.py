"""Blocks of a message, and requests as chat requests."""

import msgspec
import pytest

from jaxllm.anthropic.message import TextBlock, ThinkingBlock, ToolUseBlock, add_up
from jaxllm.anthropic.request import MessagesRequest
from jaxllm.errors import ValidationError
from jaxllm.openai.blocks import Blocks
from jaxllm.openai.message import MessageParser
from jaxllm.parsers.answer_format import AnswerFormat

BODY = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
TOOL = {"name": "look", "input_schema": {"type": "object"}, "description": "Look.", "strict": True}
OFFERED = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
TEXT = f"<think>Hm, hm.</think>\n\nWait. {CALL}\n{CALL}"


def parser():
    answer_format = AnswerFormat.of("qwen3", "hermes")
    parser = answer_format.parser("", OFFERED)
    return MessageParser(parser, parallel_calls=True, show_reasoning=True)


def blocks_of(*texts, hides_thinking=False):
    blocks, message = Blocks(), parser()
    pieces = []
    for text in texts:
        pieces += blocks.feed(message.feed(text, ()))
    pieces += blocks.feed(message.finish()) + blocks.finish()
    return add_up(pieces, hides_thinking=hides_thinking)


def without_ids(blocks):
    return [
        msgspec.structs.replace(block, id="") if isinstance(block, ToolUseBlock) else block
        for block in blocks
    ]


def test_thoughts_text_and_calls_are_blocks():
    thinking, text, *calls = blocks_of(TEXT)
    assert thinking == ThinkingBlock(thinking="Hm, hm.")
    assert text.text.strip() == "Wait."
    assert [(one.name, one.input) for one in calls] == [("look", {"at": "sea"})] * 2
    assert calls[0].id != calls[1].id


@pytest.mark.parametrize("place", range(1, len(TEXT)))
def test_every_split_makes_the_same_blocks(place):
    expected = without_ids(blocks_of(TEXT))
    assert without_ids(blocks_of(TEXT[:place], TEXT[place:])) == expected


def test_space_alone_is_no_block():
    assert blocks_of("  \n", "\t") == []
    assert blocks_of(" ", " a ", " ") == [TextBlock(text="  a  ")]


def test_thoughts_may_be_hidden():
    thinking, *_ = blocks_of(TEXT, hides_thinking=True)
    assert thinking == ThinkingBlock(thinking="")


def test_a_call_that_is_cut_off_has_no_input():
    *_, call = blocks_of(TEXT[: TEXT.index("sea")])
    assert (call.name, call.input) == ("look", {})


def test_a_request_becomes_a_chat_request():
    form = {"type": "json_schema", "schema": {"type": "object"}}
    chat = MessagesRequest.read(
        BODY
        | {
            "system": "Be brief",
            "stop_sequences": ["."],
            "tools": [TOOL],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "low", "format": form},
            "temperature": 0.5,
            "metadata": {"user_id": "u"},
        }
    ).chat
    assert [one["role"] for one in chat.messages] == ["system", "user"]
    assert (chat.max_tokens, chat.stop, chat.temperature) == (8, ["."], 0.5)
    (tool,) = chat.tools
    assert (tool.function.name, tool.function.strict) == ("look", True)
    assert tool.function.parameters == {"type": "object"}
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("required", False)
    kwargs = {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}
    assert chat.chat_template_kwargs == kwargs
    assert chat.response_format.json_schema.schema == {"type": "object"}
    assert MessagesRequest.read(BODY | {"thinking": {"type": "disabled"}}).chat == (
        MessagesRequest.read(
            BODY | {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}
        ).chat
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"stop": ["a"]}, "stop"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0]"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any", "name": "look"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"mcp_servers": [{"url": "http://a"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "context_management"),
        ({"container": "c"}, "container"),
        ({"no_such": 1}, "no_such"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(changes, field):
    with pytest.raises(ValidationError) as caught:
        MessagesRequest.read(BODY | changes)
    assert caught.value.parameter == field


def test_fields_that_ask_for_nothing_are_taken():
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    MessagesRequest.read(BODY | {"context_management": edits, "mcp_servers": [], "container": None})
