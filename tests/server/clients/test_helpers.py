"""The helpers of clients that parse answers into types, whole and streamed, as they come."""

import json

import anthropic
import openai
import pydantic
import pytest
from langchain_openai import ChatOpenAI
from openai.lib._tools import pydantic_function_tool

pytestmark = pytest.mark.slow  # the first one starts an engine

KEY = "a-key"
HELLO = [{"role": "user", "content": "Hello"}]
PLACE = "the sea, and all that lives in it"
TEXT = json.dumps({"depth": 5, "at": PLACE})
CHAT = {"model": "tiny", "messages": HELLO, "max_tokens": 120, "temperature": 0}
RESPONSE = {"model": "tiny", "input": "Hello", "max_output_tokens": 120, "temperature": 0}


class Look(pydantic.BaseModel):
    """Look somewhere."""

    depth: int
    at: str


SEEN = Look(depth=5, at=PLACE)


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def test_chats_are_parsed(client, says, piece_by_piece):
    body = CHAT | {"extra_body": says(TEXT)}
    (choice,) = client.chat.completions.parse(**body, response_format=Look).choices
    assert (choice.message.parsed, choice.finish_reason) == (SEEN, "stop")
    with client.chat.completions.stream(**body, response_format=Look) as stream:
        partial = [event.parsed for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == SEEN
    assert {"depth": 5} in partial  # before it was finished
    assert partial[-1] == SEEN.model_dump()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Look"}}])
def test_calls_are_parsed(client, says, piece_by_piece, choice):
    text = json.dumps([{"name": "Look", "parameters": json.loads(TEXT)}])
    body = CHAT | {"extra_body": says(text if choice == "required" else TEXT)}
    body |= {"tools": [pydantic_function_tool(Look)], "tool_choice": choice}
    (answer,) = client.chat.completions.parse(**body).choices
    (call,) = answer.message.tool_calls
    assert call.function.parsed_arguments == SEEN
    with client.chat.completions.stream(**body) as stream:
        pieces = [
            event.arguments_delta
            for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert "".join(pieces) == call.function.arguments == streamed.function.arguments
    assert len(pieces) > 3  # as the model writes them
    assert streamed.function.parsed_arguments == SEEN


def test_responses_are_parsed(client, says):
    body = RESPONSE | {"extra_body": says(TEXT)}
    assert client.responses.parse(**body, text_format=Look).output_parsed == SEEN
    with client.responses.stream(**body, text_format=Look) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == SEEN


def test_messages_are_parsed(server, says):
    base_url = str(server.base_url)
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 120, "extra_body": says(TEXT)}
    with anthropic.Anthropic(base_url=base_url, api_key=KEY, max_retries=0) as client:
        assert client.messages.parse(**body, output_format=Look).parsed_output == SEEN
        with client.messages.stream(**body, output_format=Look) as stream:
            assert "".join(stream.text_stream) == TEXT
            assert stream.get_final_message().parsed_output == SEEN


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_s_structured_output(url, says, method):
    model = ChatOpenAI(
        base_url=url, api_key=KEY, model="tiny", max_tokens=120, temperature=0, max_retries=0,
        extra_body=says(TEXT),
    )  # fmt: skip
    structured = model.with_structured_output(Look, method=method)
    assert structured.invoke("Hello") == SEEN
    assert [*structured.stream("Hello")][-1] == SEEN
