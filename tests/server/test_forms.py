"""Answers over HTTP that keep the form that their request asks for, and what is refused."""

import json
import re

import jsonschema
import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "ping"}},
]
COMPACT = {"disable_any_whitespace": True}


@pytest.fixture(scope="module")
def client(host):
    with host.serve() as client:
        yield client


def post(client, path, **body):
    body = {"messages": HELLO} | body if path == CHAT else {"prompt": "hi"} | body
    return client.post(path, json={"max_tokens": 400, "seed": 1, "temperature": 1} | body)


def choice_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def chunks_of(client, path, **body):
    lines = post(client, path, stream=True, **body).text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [choice for chunk in data[:-1] for choice in json.loads(chunk)["choices"]]


def test_a_schema_by_response_format_whole_and_streamed(client):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    choice = choice_of(post(client, CHAT, response_format=form))
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    chunks = chunks_of(client, CHAT, response_format=form)
    text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
    assert text == choice["message"]["content"] and chunks[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"\d{3}-[a-c]{2}"}, r"\d{3}-[a-c]{2}"),
        ({"choice": ["yes", "no, never"]}, "yes|no, never"),
        ({"grammar": 'root ::= "<" [a-z]{2} ">"'}, "<[a-z]{2}>"),
        ({"grammar": 'start: "x" /[0-9]{2}/'}, r"x\d\d"),
        ({"json": SCHEMA} | COMPACT, r'\{"city":"\w+","days":\[[-\d,]*\]\}'),
    ],
)
def test_forms_of_completions(client, form, pattern):
    for choice in post(client, COMPLETIONS, structured_outputs=form, n=3).json()["choices"]:
        assert re.fullmatch(pattern, choice["text"]) and choice["finish_reason"] == "stop"


def test_calls_that_are_asked_for(client):
    message = choice_of(post(client, CHAT, tools=TOOLS, tool_choice="required"))["message"]
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "look":
            jsonschema.validate(arguments, SCHEMA)
    named = {"type": "function", "function": {"name": "look"}}
    choice = choice_of(post(client, CHAT, tools=TOOLS, tool_choice=named))
    (call,) = choice["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] is None
    deltas = [c["delta"] for c in chunks_of(client, CHAT, tools=TOOLS, tool_choice=named)]
    first, *rest = [part for delta in deltas for part in delta.get("tool_calls", [])]
    assert first["function"] == {"name": "look", "arguments": ""}
    streamed = "".join(part["function"]["arguments"] for part in rest)
    assert streamed == call["function"]["arguments"]


def test_the_form_begins_after_the_reasoning(host):
    with host.serve(reasoning_parser="deepseek_r1") as client:
        asked = {"structured_outputs": {"regex": "[0-9]{4}"}, "n": 4}
        found = 0
        for choice in post(client, CHAT, **asked, max_tokens=200).json()["choices"]:
            content = choice["message"]["content"]
            # A random model seldom ends its reasoning, and nothing else has no form.
            assert not content or re.fullmatch("[0-9]{1,4}", content)
            found += bool(choice["message"].get("reasoning"))
        assert found
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        content = choice_of(post(client, CHAT, **asked, **off))["message"]["content"]
        assert re.fullmatch("[0-9]{4}", content)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"$ref": "#/$defs/none"}},
                }
            },
            "response_format.json_schema.schema",
        ),
        (
            {
                "tools": [
                    TOOLS[1],
                    {"type": "function", "function": {"name": "b", "parameters": {"not": {}}}},
                ],
                "tool_choice": "required",
            },
            "tools[1].function.parameters",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(client, body, param):
    response = post(client, CHAT, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), response.text
    assert error["message"].startswith(param)
