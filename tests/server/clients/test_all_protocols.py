"""One conversation has one answer, whatever protocol asks; what is no conversation is refused."""

import json

import pytest

pytestmark = pytest.mark.slow  # the first one starts an engine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sea"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}


def asked(server, path, body):
    answer = server.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server, path, body):
    text = server.post(path, json=body | {"stream": True}).text
    data = [line.removeprefix("data: ") for line in text.splitlines() if line[:5] == "data:"]
    return [json.loads(one) for one in data if one != "[DONE]"]


@pytest.mark.parametrize(
    ("system", "turns"),
    [
        (None, ["Hello"]),
        ("Be brief.", ["Who are you?", "A model.", "Of what?"]),
        ("é☀️", ["1\n\n2 ", "  x", "<|im_end|>"]),
    ],
)
def test_a_greedy_answer_is_the_same(server, system, turns):
    messages = [
        {"role": ("user", "assistant")[place % 2], "content": text}
        for place, text in enumerate(turns)
    ]
    before = [] if system is None else [{"role": "system", "content": system}]
    chat = {"messages": [*before, *messages], "max_tokens": 12, "temperature": 0}
    answer = asked(server, CHAT, chat)
    expected = answer["choices"][0]["message"]["content"]
    prompt = asked(server, f"{CHAT}/render", chat)["token_ids"]
    same = {"max_tokens": 12, "temperature": 0}
    texts, lengths = [expected], [answer["usage"]["prompt_tokens"]]

    # Parsers may need special tokens, so chats have them.
    plain = asked(server, COMPLETIONS, same | {"prompt": prompt, "skip_special_tokens": False})
    texts.append(plain["choices"][0]["text"])
    lengths.append(plain["usage"]["prompt_tokens"])
    body = {"input": messages, "instructions": system, "max_output_tokens": 12, "temperature": 0}
    response = asked(server, RESPONSES, body)
    texts.append(response["output"][0]["content"][0]["text"])
    lengths.append(response["usage"]["input_tokens"])
    texts += ["".join(
        one["delta"] for one in events(server, RESPONSES, body)
        if one["type"] == "response.output_text.delta"
    )]  # fmt: skip
    body = same | {"messages": messages} | ({} if system is None else {"system": system})
    message = asked(server, MESSAGES, body)
    texts.append(message["content"][0]["text"])
    usage = message["usage"]
    lengths.append(usage["input_tokens"] + usage["cache_read_input_tokens"])
    texts.append("".join(
        one["delta"]["text"] for one in events(server, MESSAGES, body)
        if one["type"] == "content_block_delta"
    ))  # fmt: skip
    texts.append("".join(
        one["choices"][0]["delta"].get("content", "") for one in events(server, CHAT, chat)
    ))  # fmt: skip
    # A text begins with its first character that is no space, where texts are blocks.
    assert {text.strip() for text in texts} == {expected.strip()}
    assert set(lengths) == {len(prompt)}


def test_thinking_and_calls_are_the_same(server, says):
    said = says(f"<think>Hm.</think>I look. {CALL}")
    ask = {"role": "user", "content": "Hello"}
    function = {"name": "look", "parameters": SCHEMA}
    chat = asked(server, CHAT, {
        "messages": [ask], "max_tokens": 150, "tools": [{"type": "function", "function": function}],
    } | said)  # fmt: skip
    message = chat["choices"][0]["message"]
    (call,) = message["tool_calls"]
    response = asked(server, RESPONSES, {
        "input": [ask], "max_output_tokens": 150, "tools": [function | {"type": "function"}],
    } | said)  # fmt: skip
    reasoning, text, called = response["output"]
    anthropic = asked(server, MESSAGES, {
        "messages": [ask], "max_tokens": 150, "tools": [{"name": "look", "input_schema": SCHEMA}],
    } | said)  # fmt: skip
    thought, said_too, used = anthropic["content"]
    arguments = json.loads(call["function"]["arguments"])
    assert arguments == json.loads(called["arguments"]) == used["input"] == {"at": "the sea"}
    assert call["function"]["name"] == called["name"] == used["name"]
    assert message["reasoning"] == reasoning["content"][0]["text"] == thought["thinking"]
    texts = {message["content"], text["content"][0]["text"], said_too["text"]}
    assert {one.strip() for one in texts} == {"I look."}
    sizes = [
        chat["usage"]["completion_tokens"],
        response["usage"]["output_tokens"],
        anthropic["usage"]["output_tokens"],
    ]
    assert len(set(sizes)) == 1


CALLED = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
USER = {"role": "user", "content": "Hello"}
USED = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
ITEM = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "a", "output": "Waves."}
HUGE = "sea " * 20_000


def turn(**fields):
    return {"role": "assistant", "content": None} | fields


@pytest.mark.parametrize(
    ("path", "field", "history"),
    [
        (CHAT, "messages", []),
        (CHAT, "messages[0]", [{}]),
        (CHAT, "messages[0]", [{"role": 5, "content": "a"}]),
        (CHAT, "messages[0].content", [{"role": "user", "content": {"text": "a"}}]),
        (CHAT, "messages[0].content[0]", [{"role": "user", "content": [{"type": "audio_url"}]}]),
        (CHAT, "messages[0].content[0].text", [{"role": "user", "content": [{"type": "text"}]}]),
        (CHAT, "messages[1].tool_calls", [USER, turn(tool_calls="look")]),
        (CHAT, "messages[1].tool_calls[0]", [USER, turn(tool_calls=["look"])]),
        (CHAT, "messages[1].tool_calls[0].function.arguments",
         [USER, turn(tool_calls=[{"function": {"name": "look", "arguments": "{"}}])]),
        (CHAT, "messages[1].tool_calls[0].function.name", [USER, turn(tool_calls=[{"id": "a"}])]),
        (CHAT, "messages[1].tool_calls[1].id", [USER, turn(tool_calls=[CALLED, CALLED])]),
        (CHAT, "messages[1].tool_calls[0].id", [USER, turn(tool_calls=[CALLED]), USER]),
        (CHAT, "messages[1].tool_call_id", [USER, {"role": "tool", "tool_call_id": "a",
                                                   "content": "Waves."}]),
        (CHAT, "messages", [USER | {"content": HUGE}]),
        (RESPONSES, "input[1].call_id", [USER, ITEM]),
        (RESPONSES, "input[1].call_id", [USER, RESULT]),
        (RESPONSES, "input[1].arguments", [USER, ITEM | {"arguments": "{"}, RESULT]),
        (RESPONSES, "input", [USER | {"content": HUGE}]),
        (MESSAGES, "messages[1].content[0].id", [USER, turn(content=[USED]), USER]),
        (MESSAGES, "messages[0].content[0].tool_use_id",
         [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]),
        (MESSAGES, "messages", [USER | {"content": HUGE}]),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_refused_by_its_field(server, path, field, history):
    name = "input" if path == RESPONSES else "messages"
    body = {name: history} | ({"max_tokens": 5} if path == MESSAGES else {})
    answer = server.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["message"].startswith(field), error["message"][:200]
    assert error.get("param", field) == field
    assert len(error["message"]) < 2100


def test_many_messages_are_refused_at_once(server):
    for path in (CHAT, MESSAGES):
        answer = server.post(path, json={"messages": [USER] * 9000, "max_tokens": 1})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("messages")
