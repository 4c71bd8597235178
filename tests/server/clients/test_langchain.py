"""LangChain's classes for OpenAI, as they come."""

import asyncio
import json

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

pytestmark = pytest.mark.slow  # the first one starts an engine

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sea"}}\n</tool_call>'
ASKED = [SystemMessage("Be brief."), HumanMessage("Hello")]


def look(at: str) -> str:
    """Look somewhere."""
    return f"{at}: waves"


@pytest.fixture(scope="module")
def model(url):
    def model(**options):
        options = {"max_tokens": 8, "temperature": 0, "max_retries": 0} | options
        return ChatOpenAI(base_url=url, api_key="a-key", model="tiny", **options)

    return model


def test_answers_at_once_and_in_pieces_are_the_same(model):
    answer = model().invoke(ASKED)
    assert isinstance(answer, AIMessage) and answer.content
    assert answer.usage_metadata["output_tokens"] == 8
    assert answer.response_metadata["finish_reason"] == "length"
    whole = None
    for chunk in model(stream_usage=True).stream(ASKED):
        whole = chunk if whole is None else whole + chunk
    assert whole.content == answer.content
    assert whole.usage_metadata["total_tokens"] == answer.usage_metadata["total_tokens"]
    assert asyncio.run(model().ainvoke(ASKED)).content == answer.content
    assert [one.content for one in model().batch([ASKED] * 3)] == [answer.content] * 3


def test_logprobs(model):
    answer = model(logprobs=True, top_logprobs=2).invoke("Hello")
    content = answer.response_metadata["logprobs"]["content"]
    assert len(content) == 8 and all(len(one["top_logprobs"]) == 2 for one in content)


def test_a_tool_is_called_and_its_result_is_read(model, says):
    bound = model(max_tokens=100, extra_body=says(CALL)).bind_tools([look])
    answer = bound.invoke(ASKED)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("look", {"at": "the sea"})
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    whole = None
    for chunk in bound.stream(ASKED):
        whole = chunk if whole is None else whole + chunk
    assert [(one["name"], one["args"]) for one in whole.tool_calls] == [("look", call["args"])]
    assert json.loads(whole.tool_call_chunks[0]["args"]) == call["args"]
    result = ToolMessage(look(**call["args"]), tool_call_id=call["id"])
    then = model(max_tokens=100, extra_body=says("I see.")).bind_tools([look])
    assert then.invoke([*ASKED, answer, result]).content == "I see."


def test_completions(url):
    model = OpenAI(
        base_url=url, api_key="a-key", model="tiny", max_tokens=8, temperature=0, max_retries=0
    )
    answer = model.invoke("Once upon a time")
    assert answer
    assert "".join(model.stream("Once upon a time")) == answer
