"""OpenAI's own client: every way to ask, each answer strictly of the types that it knows."""

import asyncio
import json
import re

import openai
import pydantic
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

pytestmark = pytest.mark.slow  # the first one starts an engine

KEY = "a-key"
HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"model": "tiny", "messages": HELLO, "max_tokens": 8, "temperature": 0}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sea"}}\n</tool_call>'
# Fields that vLLM has and OpenAI has not.
VLLMS = {
    "kv_transfer_params", "max_model_len", "parent", "prompt_logprobs", "prompt_token_ids",
    "reasoning", "root", "stop_reason", "token_ids",
}  # fmt: skip


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def strict(kind, body):
    """The body as the client's type, if it is one without any conversion."""
    value = kind.model_validate_json(json.dumps(body), strict=True)
    assert set(extras(value)) <= VLLMS
    return value


def extras(value):
    """The names of fields that the types do not know."""
    if isinstance(value, pydantic.BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from extras(getattr(value, name))
    elif isinstance(value, list):
        for one in value:
            yield from extras(one)


def whole(endpoint, kind, **body):
    return strict(kind, endpoint.with_raw_response.create(**body).http_response.json())


def chunks(endpoint, kind, **body):
    """The chunks of a stream, as they were sent."""
    with endpoint.with_streaming_response.create(**body, stream=True) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [strict(kind, json.loads(line)) for line in lines]


def test_models(client, server):
    listed = server.get("/v1/models").json()
    assert listed["object"] == "list"
    models = [strict(Model, one) for one in listed["data"]]
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias") == models[1]


def test_a_whole_chat(client):
    body = GREEDY | {"temperature": 1, "seed": 1, "n": 2, "logprobs": True, "top_logprobs": 3}
    answer = whole(client.chat.completions, ChatCompletion, **body, stop=["zzz"])
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.message.role == "assistant" and choice.finish_reason == "length"
        assert "".join(one.token for one in choice.logprobs.content)
        assert all(len(one.top_logprobs) == 3 for one in choice.logprobs.content)
    usage = answer.usage
    assert usage.completion_tokens == 16
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert answer.system_fingerprint.startswith("fp_")
    assert client.chat.completions.create(**body, stop=["zzz"]).choices == answer.choices


def test_a_streamed_chat(client):
    body = GREEDY | {"logprobs": True, "top_logprobs": 1}
    answer = whole(client.chat.completions, ChatCompletion, **body)
    options = {"include_usage": True}
    found = chunks(client.chat.completions, ChatCompletionChunk, **body, stream_options=options)
    assert found[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in found[:-1])
    assert text == answer.choices[0].message.content
    assert found[-2].choices[0].finish_reason == "length"
    assert found[-1].choices == [] and found[-1].usage.total_tokens == answer.usage.total_tokens
    assert len({(chunk.id, chunk.system_fingerprint) for chunk in found}) == 1


def test_the_helper_for_streams(client, says):
    body = GREEDY | {"max_tokens": 100, "extra_body": says("The sea is blue.")}
    with client.chat.completions.stream(**body, logprobs=True) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= set(kinds)
    (choice,) = last.choices
    assert (choice.message.content, choice.finish_reason) == ("The sea is blue.", "stop")
    # It raises an error of its own for an answer that was cut off.
    with client.chat.completions.stream(**GREEDY) as stream:
        with pytest.raises(openai.LengthFinishReasonError):
            stream.get_final_completion()


def test_a_tool_is_called_and_its_result_is_read(client, says):
    body = GREEDY | {"max_tokens": 100, "tools": [LOOK], "extra_body": says("Wait. " + CALL)}
    answer = whole(client.chat.completions, ChatCompletion, **body)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content.strip()) == ("tool_calls", "Wait.")
    (call,) = choice.message.tool_calls
    assert call.function.name == "look"
    assert json.loads(call.function.arguments) == {"at": "the sea"}
    messages = [
        *HELLO,
        choice.message.model_dump(exclude_unset=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Waves."},
    ]
    body |= {"messages": messages, "extra_body": says("I see."), "tool_choice": "auto"}
    (choice,) = client.chat.completions.create(**body).choices
    assert (choice.message.content, choice.finish_reason) == ("I see.", "stop")
    assert choice.message.tool_calls is None


def test_a_tool_is_called_in_a_stream(client, says):
    body = GREEDY | {"max_tokens": 160, "tools": [LOOK], "extra_body": says(CALL + CALL)}
    found = chunks(client.chat.completions, ChatCompletionChunk, **body)
    assert found[-1].choices[0].finish_reason == "tool_calls"
    pieces = {0: "", 1: ""}
    for chunk in found:
        for call in chunk.choices[0].delta.tool_calls or ():
            pieces[call.index] += call.function.arguments
    assert [json.loads(text) for text in pieces.values()] == [{"at": "the sea"}] * 2
    with client.chat.completions.stream(**body) as stream:
        done = [one for one in stream if one.type == "tool_calls.function.arguments.done"]
        (choice,) = stream.get_final_completion().choices
    assert [one.name for one in done] == ["look", "look"]
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_reasoning_is_told_beside_the_answer(client, says):
    body = GREEDY | {"max_tokens": 100, "extra_body": says("<think>Hm.</think>Yes.")}
    answer = whole(client.chat.completions, ChatCompletion, **body)
    (choice,) = answer.choices
    assert (choice.message.reasoning, choice.message.content) == ("Hm.", "Yes.")
    *chunks, last = client.chat.completions.create(
        **body, stream=True, stream_options={"include_usage": True}
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    (script,) = says("<think>Hm.")["vllm_xargs"].values()
    for usage in (answer.usage, last.usage):
        assert usage.completion_tokens_details.reasoning_tokens == len(script)


def test_completions(client):
    body = {"model": "tiny", "prompt": ["Once", "The sea"], "max_tokens": 5, "seed": 2}
    body |= {"logprobs": 2, "n": 2}
    plain = whole(client.completions, Completion, **body)
    # The first token of a prompt has no logprob, which OpenAI's types do not know.
    body["echo"] = True
    answer = client.completions.create(**body)
    for one, other in zip(plain.choices, answer.choices, strict=True):
        assert other.text.endswith(one.text)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text.startswith("Once")
    assert answer.choices[3].text.startswith("The sea")
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    texts = {choice.index: "" for choice in answer.choices}
    for chunk in client.completions.create(**body, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in answer.choices}
    ids = client.completions.create(model="tiny", prompt=[[5, 6], [7]], max_tokens=1)
    assert ids.usage.prompt_tokens == 3


def test_a_request_has_a_name(client):
    answer = client.chat.completions.create(**GREEDY)
    assert answer.id == f"chatcmpl-{answer._request_id}"
    mine = client.completions.create(
        model="tiny", prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert (mine.id, mine._request_id) == ("cmpl-mine-1", "mine-1")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**GREEDY | {"n": 0})
    assert caught.value.request_id
    odd = client.completions.create(
        model="tiny", prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "x" * 200}
    )
    assert len(odd._request_id) == 32


@pytest.mark.parametrize(
    ("changes", "kind", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            openai.BadRequestError,
            "response_format.json_schema",
        ),
        ({"extra_body": {"guided_json": {}}}, openai.BadRequestError, "guided_json"),
        ({"tools": []}, openai.BadRequestError, "tools"),
        ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice"),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "stream_options"),
        ({"extra_body": {"no_such": 1}}, openai.BadRequestError, "no_such"),
        ({"extra_body": {"suffix": "x"}}, openai.BadRequestError, "suffix"),
        ({"extra_body": {"cache_salt": "a/b"}}, openai.BadRequestError, "cache_salt"),
        ({"extra_body": {"priority": 1}}, openai.BadRequestError, "priority"),
        ({"extra_headers": {"Authorization": "Bearer b"}}, openai.AuthenticationError, None),
    ],
)
def test_errors_are_of_the_client_s_kinds(client, changes, kind, param):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**GREEDY | changes)
    assert caught.value.param == param
    assert caught.value.body.keys() == {"message", "type", "param", "code"}
    assert caught.value.body["code"] == caught.value.status_code


def test_answers_have_the_form_that_is_asked_for(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    switch = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    body = GREEDY | {"max_tokens": 300, "temperature": 1, "seed": 3} | switch
    answer = client.chat.completions.create(**body, response_format=asked).choices[0]
    form = r"(<think>.*</think>\n*)?\{\s*\"a\"\s*:\s*[12]\s*\}"
    if answer.finish_reason == "stop":
        assert re.fullmatch(form, answer.message.content, re.DOTALL)
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    named = {"type": "function", "function": {"name": "look"}}
    for choice in ("required", named):
        answer = client.chat.completions.create(**body, tools=[tool], tool_choice=choice).choices[0]
        for call in answer.message.tool_calls or ():
            assert call.function.name == "look"
            if answer.finish_reason != "length":
                assert json.loads(call.function.arguments)["a"] in (1, 2)


def test_an_overload_is_an_error_to_try_again_after(host):
    with host.serve(max_queued_tokens=1, access_log=False) as server:
        client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="--max-queued-tokens"):
            client.chat.completions.create(**GREEDY)
    with host.serve(max_queued_bytes=10, access_log=False) as server:
        client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(**GREEDY)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["Retry-After"] == "1"


def test_the_asynchronous_client(url, client, host, says):
    wanted = client.chat.completions.create(**GREEDY).choices[0].message.content

    async def use():
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as theirs:
            assert [model.id async for model in theirs.models.list()] == ["tiny", "alias"]
            many = [theirs.chat.completions.create(**GREEDY) for _ in range(8)]
            texts = [answer.choices[0].message.content for answer in await asyncio.gather(*many)]
            assert texts == [wanted] * 8
            stream = await theirs.chat.completions.create(**GREEDY, stream=True)
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(parts) == wanted
            said = GREEDY | {"max_tokens": 100, "extra_body": says("It is blue.")}
            async with theirs.chat.completions.stream(**said) as helper:
                last = await helper.get_final_completion()
            assert last.choices[0].message.content == "It is blue."
            endless = GREEDY | {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}
            stream = await theirs.chat.completions.create(**endless, stream=True)
            await anext(aiter(stream))
            await stream.close()
            with pytest.raises(openai.NotFoundError):
                await theirs.models.retrieve("gpt-4")

    asyncio.run(use())
    assert host.wait_until_idle().num_blocks_used == 0
