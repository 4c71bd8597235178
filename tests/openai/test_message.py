"""What the parsers find becomes parts of a chat message, at once and in a stream."""

import json

import msgspec
import pytest

from jaxllm import SamplingParams, ValidationError
from jaxllm.openai.chat import ChatRequest
from jaxllm.openai.chat_answer import answer_chat
from jaxllm.openai.chat_stream import ChatStream
from jaxllm.openai.served_model import ServedModel
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.parsers.answer_format import AnswerFormat

CALLS = (
    "<think>Where?</think>Wait.\n"
    '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'
    '<tool_call>{"name": "go", "arguments": {}}</tool_call>'
)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "go")]


def served(reasoning="qwen3", tools="hermes"):
    return ServedModel(
        names=("tiny",),
        tokenizer=None,
        default_params=SamplingParams(),
        fingerprint="fp",
        max_model_len=100,
        answer_format=AnswerFormat.of(reasoning, tools),
    )


def read(**body):
    return ChatRequest.read({"messages": [], "tools": TOOLS} | body, live=True)


def output(text, finish_reason="stop", prompt="?"):
    answer = CompletionOutput(0, text, [1] * len(text), finish_reason=finish_reason)
    return RequestOutput("1", prompt, [1, 2], None, [answer], finish_reason is not None)


def plain(value):
    return json.loads(msgspec.json.encode(value))


def whole(text=CALLS, reason="stop", **body):
    answer = answer_chat(read(**body), "id", 1, [output(text, reason)], served())
    (choice,) = plain(answer)["choices"]
    return choice


def streamed(text=CALLS, reason="stop", **body):
    """The choices of all chunks, of an answer that comes letter by letter."""
    stream = ChatStream(read(stream=True, **body), "id", 1, served())
    outputs = [output(letter, None) for letter in text] + [output("", reason)]
    return [
        choice
        for one in outputs
        for chunk in plain(stream.take(0, one))
        for choice in chunk["choices"]
    ]


def test_a_whole_answer_is_taken_apart():
    choice = whole()
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["reasoning"], message["content"].strip()) == ("Where?", "Wait.")
    first, second = message["tool_calls"]
    assert first["function"]["name"] == "look"
    assert json.loads(first["function"]["arguments"]) == {"at": "x"}
    assert second["function"] == {"name": "go", "arguments": "{}"}
    assert first["id"] != second["id"] and first["type"] == "function"
    assert "index" not in first


def test_a_stream_adds_up_to_the_whole():
    choices = streamed()
    deltas = [choice["delta"] for choice in choices]
    message = whole()["message"]
    for name in ("reasoning", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message[name]
    parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
    for index, call in enumerate(message["tool_calls"]):
        first, *rest = [part for part in parts if part["index"] == index]
        assert (first["type"], first["function"]["name"]) == ("function", call["function"]["name"])
        arguments = "".join(part["function"]["arguments"] for part in (first, *rest))
        assert arguments == call["function"]["arguments"]
        assert not any("id" in part for part in rest)
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}


def test_an_answer_of_calls_alone_has_no_content():
    message = whole(CALLS.partition("\n")[2])["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 2


def test_who_wants_less_gets_less():
    assert len(whole(parallel_tool_calls=False)["message"]["tool_calls"]) == 1
    assert not any(
        part["index"]
        for choice in streamed(parallel_tool_calls=False)
        for part in choice["delta"].get("tool_calls", [])
    )
    assert "reasoning" not in whole(include_reasoning=False)["message"]
    without = whole(tool_choice="none")
    assert without["finish_reason"] == "stop" and "tool_calls" not in without["message"]
    assert "<tool_call>" in without["message"]["content"]


def test_an_answer_that_was_cut_off_says_so():
    for choice in (whole(reason="length"), streamed(reason="length")[-1]):
        assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tools": []}, "give 1 to 128"),
        ({"tools": [{"type": "code"}]}, r"tools\[0\]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "a name has 1 to 64"),
        ({"tool_choice": "any"}, "use 'none', 'auto', 'required' or"),
        ({"tool_choice": {"type": "allowed_tools"}}, "use 'none', 'auto', 'required' or"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "none of the tools"),
        ({"tool_choice": "required", "tools": None}, "there are no tools to call"),
    ],
)
def test_tools_that_cannot_be_served_are_refused(body, message):
    with pytest.raises(ValidationError, match=message):
        read(**body).sampling_params(served())


def test_without_a_parser_tools_are_refused_but_not_if_unused():
    with pytest.raises(ValidationError, match="--enable-auto-tool-choice"):
        read().sampling_params(served(tools=None))
    params = read(tool_choice="none").sampling_params(served(reasoning=None, tools=None))
    assert params.skip_special_tokens
