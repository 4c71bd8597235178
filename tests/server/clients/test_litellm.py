"""litellm with an OpenAI-like endpoint, as it comes."""

import asyncio
import json
import os

import pytest

# Otherwise it looks for a price list on the web when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"


@pytest.fixture(scope="module")
def litellm():
    """The module, which takes seconds to import."""
    return pytest.importorskip("litellm")


pytestmark = pytest.mark.slow  # the first one starts an engine

HELLO = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sea"}}\n</tool_call>'
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module", params=["openai/tiny", "hosted_vllm/tiny"])
def options(request, url):
    return {"model": request.param, "api_base": url, "api_key": "a-key", "num_retries": 0}


@pytest.fixture(scope="module")
def chat(options):
    return options | {"messages": HELLO, "max_tokens": 8, "temperature": 0}


def test_answers_at_once_and_in_pieces_are_the_same(litellm, chat):
    answer = litellm.completion(**chat)
    (choice,) = answer.choices
    assert choice.message.content and choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    parts = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == choice.message.content
    assert parts[-1].usage.total_tokens == answer.usage.total_tokens

    async def use():
        whole = await litellm.acompletion(**chat)
        stream = await litellm.acompletion(**chat, stream=True)
        pieces = [part.choices[0].delta.content or "" async for part in stream]
        return whole.choices[0].message.content, "".join(pieces)

    assert asyncio.run(use()) == (text, text)


def test_a_tool_is_called(litellm, chat, says):
    body = chat | {"max_tokens": 100, "tools": [LOOK], "extra_body": says(CALL)}
    (choice,) = litellm.completion(**body).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.function.name == "look"
    assert json.loads(call.function.arguments) == {"at": "the sea"}
    parts = list(litellm.completion(**body, stream=True))
    rebuilt = litellm.stream_chunk_builder(parts)
    assert rebuilt.choices[0].message.tool_calls[0].function.arguments == call.function.arguments


def test_logprobs_and_several_answers(litellm, chat):
    body = chat | {"n": 2, "temperature": 1, "seed": 1, "logprobs": True, "top_logprobs": 2}
    answer = litellm.completion(**body)
    assert [len(choice.logprobs.content) for choice in answer.choices] == [8, 8]


def test_completions(litellm, options):
    answer = litellm.text_completion(**options, prompt="Once", max_tokens=5, temperature=0)
    assert answer.choices[0].text


def test_errors_are_of_the_client_s_kinds(litellm, chat):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**chat | {"temperature": -1})
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**chat | {"api_key": "b"})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**chat | {"model": chat["model"].replace("tiny", "gpt-4")})
