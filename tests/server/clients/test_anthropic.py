"""Anthropic's own client: every way to ask, each answer strictly of the types that it knows."""

import asyncio
import json

import anthropic
import httpx
import openai
import pytest
from anthropic import beta_tool
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

pytestmark = pytest.mark.slow  # the first one starts an engine

KEY = "a-key"
HELLO = [{"role": "user", "content": "Hello"}]
# The client has no argument for the temperature any more.
TEMPERATURE = {"extra_body": {"temperature": 0}}
GREEDY = {"model": "tiny", "messages": HELLO, "max_tokens": 8} | TEMPERATURE
CHAT = GREEDY | {"temperature": 0}
del CHAT["extra_body"]
LOOK = {
    "name": "look",
    "description": "Look somewhere.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sea"}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(
        base_url=str(server.base_url), api_key=KEY, max_retries=0, timeout=300
    ) as client:
        yield client


def strict(kind, body):
    return TypeAdapter(kind).validate_json(json.dumps(body), strict=True)


def whole(client, **body):
    return strict(Message, client.messages.with_raw_response.create(**body).http_response.json())


def events(client, **body):
    """The events of a stream as they were sent, each named by its type."""
    with client.messages.with_streaming_response.create(**body, stream=True) as response:
        lines = [line for line in response.iter_lines() if line]
    names, data = lines[::2], [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [f"event: {one['type']}" for one in data]
    return [strict(RawMessageStreamEvent, one) for one in data]


def test_a_message_is_the_chat_s_answer(client, server):
    answer = whole(client, **GREEDY)
    chat = server.post("/v1/chat/completions", json=CHAT).json()
    (block,) = answer.content
    assert block.text == chat["choices"][0]["message"]["content"]
    assert (answer.role, answer.model, answer.stop_reason) == ("assistant", "tiny", "max_tokens")
    assert answer.id.startswith("msg_")
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
    assert usage.output_tokens == 8
    counted = client.messages.count_tokens(model="tiny", messages=HELLO)
    assert counted.input_tokens == chat["usage"]["prompt_tokens"]


def test_a_stream_is_the_whole_in_pieces(client, says):
    text = f"<think>Hm.</think>I look. {CALL}"
    body = GREEDY | {"max_tokens": 160, "tools": [LOOK], "extra_body": says(text)}
    answer = whole(client, **body)
    found = events(client, **body)
    kinds = [one.type for one in found]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert found[0].message.content == [] and found[0].message.stop_reason is None
    with client.messages.stream(**body) as stream:
        last = stream.get_final_message()
    for message in (answer, last):
        thinking, text, call = message.content
        assert (thinking.thinking, text.text.strip()) == ("Hm.", "I look.")
        assert (call.name, call.input) == ("look", {"at": "the sea"})
        assert message.stop_reason == "tool_use"
    assert last.usage.output_tokens == answer.usage.output_tokens
    with client.messages.stream(**GREEDY | {"extra_body": says("The sea.")}) as stream:
        assert "".join(stream.text_stream) == "The sea."


def test_the_results_of_tools_go_back(client, says):
    body = GREEDY | {"max_tokens": 160, "tools": [LOOK], "extra_body": says(CALL)}
    answer = client.messages.create(**body)
    (call,) = answer.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Waves."}
    messages = [
        *HELLO,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    body |= {"messages": messages, "extra_body": says("I see waves.")}
    answer = client.messages.create(**body, system="Be brief")
    assert (answer.content[0].text, answer.stop_reason) == ("I see waves.", "end_turn")


def test_the_helper_that_runs_tools(client, says):
    seen = []

    @beta_tool
    def look(at: str) -> str:
        """Look somewhere.

        Args:
            at: where
        """
        seen.append(at)
        return "Waves."

    asked = GREEDY | {"max_tokens": 160, "extra_body": says(CALL)}
    runner = client.beta.messages.tool_runner(**asked, tools=[look], max_iterations=2)
    answers = list(runner)
    # The script is the same in each turn, so the second one calls, too.
    assert [one.stop_reason for one in answers] == ["tool_use", "tool_use"]
    assert seen[0] == "the sea"


def test_why_a_message_stops(client, says):
    said = GREEDY | {"max_tokens": 100, "extra_body": says("One. Two.")}
    answer = whole(client, **said, stop_sequences=[" Two", "zzz"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " Two")
    assert answer.content[0].text == "One."
    (delta,) = [
        one
        for one in events(client, **said, stop_sequences=[" Two"])
        if one.type == "message_delta"
    ]
    assert (delta.delta.stop_reason, delta.delta.stop_sequence) == ("stop_sequence", " Two")
    assert whole(client, **said).stop_reason == "end_turn"
    full = GREEDY | {"max_tokens": 100000, "extra_body": {"ignore_eos": True}}
    assert whole(client, **full).stop_reason == "model_context_window_exceeded"


def test_an_answer_that_was_begun_goes_on(client, server):
    messages = [*HELLO, {"role": "assistant", "content": "Well"}]
    answer = client.messages.create(**GREEDY | {"messages": messages})
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    body = CHAT | {"messages": messages} | flags
    chat = server.post("/v1/chat/completions", json=body).json()
    assert answer.content[0].text == chat["choices"][0]["message"]["content"]


def test_forms(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    body = GREEDY | {"max_tokens": 300, "thinking": {"type": "disabled"}}
    answer = client.messages.create(**body, output_config=config)
    if answer.stop_reason == "end_turn":
        assert json.loads(answer.content[-1].text)["a"] in (1, 2)
    tool = LOOK | {"input_schema": schema}
    answer = client.messages.create(
        **body, tools=[tool], tool_choice={"type": "tool", "name": "look"}
    )
    if answer.stop_reason == "tool_use":
        assert answer.content[-1].input["a"] in (1, 2)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError, "temperature"),
        ({"model": "claude"}, anthropic.NotFoundError, "model"),
        ({"max_tokens": -1}, anthropic.BadRequestError, "max_tokens"),
        ({"stop_sequences": [""]}, anthropic.BadRequestError, "stop_sequences"),
        ({"tools": [LOOK | {"name": "a b"}]}, anthropic.BadRequestError, r"tools\[0\].name"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         anthropic.BadRequestError, r"messages\[0\].content\[0\]"),
        ({"extra_body": {"no_such": 1}}, anthropic.BadRequestError, "no_such"),
        ({"messages": [{"role": "user", "content": "a" * 9000}]},
         anthropic.BadRequestError, "messages"),
    ],
)  # fmt: skip
def test_errors_are_of_the_client_s_kinds(client, changes, kind, words):
    with pytest.raises(kind, match=words) as caught:
        client.messages.create(**GREEDY | changes)
    assert caught.value.body.keys() == {"type", "error"}
    assert caught.value.body["error"].keys() == {"type", "message"}


def test_a_wrong_key_is_an_error_of_its_kind(server):
    base_url = str(server.base_url)
    with anthropic.Anthropic(base_url=base_url, api_key="b", max_retries=0) as theirs:
        with pytest.raises(anthropic.AuthenticationError, match="API key") as caught:
            theirs.messages.create(**GREEDY)
    assert caught.value.body["error"]["type"] == "authentication_error"


def test_either_header_has_the_key(server, url):
    for headers in ({"X-Api-Key": KEY}, {"Authorization": f"Bearer {KEY}"}):
        body = {"json": CHAT, "headers": headers, "timeout": 300}
        assert httpx.post(f"{url}/messages", **body).status_code == 200
    wrong = {"X-Api-Key": "b"}
    assert httpx.post(f"{url}/messages", json=CHAT, headers=wrong).status_code == 401
    assert httpx.post(f"{url}/messages", json=CHAT).json()["type"] == "error"


def test_the_asynchronous_client_and_a_closed_stream(server, host, says):
    async def use():
        async with anthropic.AsyncAnthropic(
            base_url=str(server.base_url), auth_token=KEY, api_key=None, max_retries=0
        ) as theirs:
            many = [theirs.messages.create(**GREEDY) for _ in range(4)]
            texts = {answer.content[0].text for answer in await asyncio.gather(*many)}
            assert len(texts) == 1
            endless = GREEDY | {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}
            stream = await theirs.messages.create(**endless, stream=True)
            await anext(aiter(stream))
            await stream.close()

    asyncio.run(use())
    assert host.wait_until_idle().num_blocks_used == 0


def test_thinking_is_the_same_in_all_protocols(client, server, url, says):
    said = says("<think>Hm.</think>Yes.")
    answer = whole(client, **GREEDY | {"max_tokens": 100, "extra_body": said})
    with openai.OpenAI(base_url=url, api_key=KEY) as theirs:
        body = GREEDY | {"max_tokens": 100, "extra_body": said}
        (choice,) = theirs.chat.completions.create(**body).choices
    thinking, text = answer.content
    assert (thinking.thinking, text.text) == (choice.message.reasoning, choice.message.content)
