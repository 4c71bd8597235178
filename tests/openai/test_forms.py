"""What a body asks of the form of its answer, and how calls that it asks for come out."""

import json

import msgspec
import pytest

from jaxllm import SamplingParams, ValidationError
from jaxllm.openai.chat import ChatRequest
from jaxllm.openai.chat_answer import answer_chat
from jaxllm.openai.chat_stream import ChatStream
from jaxllm.openai.completions import CompletionRequest
from jaxllm.openai.served_model import ServedModel
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.parsers.answer_format import AnswerFormat
from jaxllm.parsers.tools.base import Tool, tool_parser
from jaxllm.parsers.tools.registry import TOOL_FORMATS
from tests.structured_output.walks import door, fits, vocabulary, walk

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "ping"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def served(reasoning=None, tools=None):
    return ServedModel(
        names=("tiny",),
        tokenizer=None,
        default_params=SamplingParams(),
        fingerprint="fp",
        max_model_len=100,
        answer_format=AnswerFormat.of(reasoning, tools),
    )


def chat(**body):
    return ChatRequest.read({"messages": []} | body, live=True)


def form_of(request, model=None):
    return request.sampling_params(model or served()).structured_outputs


@pytest.mark.parametrize(
    "read",
    [chat, lambda **body: CompletionRequest.read({"prompt": "a"} | body)],
    ids=["chat", "completion"],
)
def test_every_way_to_ask_for_a_form(read):
    assert form_of(read()) is None
    assert form_of(read(response_format={"type": "text"})) is None
    assert form_of(read(structured_outputs={"regex": "a"})).regex == "a"
    assert form_of(read(response_format={"type": "json_object"})).json_object is True
    of_schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    assert form_of(read(response_format=of_schema)).json == SCHEMA
    for more in ({"strict": True}, {"strict": False, "description": "d"}):
        of_schema["json_schema"] |= more
        assert form_of(read(response_format=of_schema)).json == SCHEMA
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    assert form_of(read(response_format=tag)).tag() == tag
    older = {"type": "structural_tag", "structures": [{"begin": "a"}], "triggers": ["a"]}
    assert form_of(read(response_format=older)).tag() == older
    # The format comes over the same kind of form, and keeps its options.
    both = form_of(
        read(
            response_format={"type": "json_object"},
            structured_outputs={"json_object": True, "disable_any_whitespace": True},
        )
    )
    assert both.json_object and both.disable_any_whitespace


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"a": json.loads("[" * 64 + "]" * 64)}},
                }
            },
            "response_format.json_schema.schema",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "a", "parameters": {"title": "é" * 400_000}},
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": ""}}},
            "response_format.json_schema.name",
        ),
        (
            {"tools": TOOLS, "tool_choice": NAMED | {"more": 1}},
            "tool_choice",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "n"}}},
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "text", "format": {}}}, "response_format.format"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "tool_choice",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_the_client_s_name(body, field):
    with pytest.raises(ValidationError) as caught:
        chat(**body).sampling_params(served())
    assert caught.value.parameter == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"not": {}}},
                }
            },
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "x"}}},
            "response_format.format.type",
        ),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex"),
        ({"tool_choice": "required"}, "tools[1].function.parameters"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "bad"}}},
            "tools[1].function.parameters",
        ),
        ({"tool_choice": "auto"}, "tools[1].function.parameters"),
    ],
)
def test_what_cannot_be_followed_has_the_client_s_name(body, field):
    if "tool_choice" in body:
        bad = {"name": "bad", "parameters": {"not": {}}, "strict": True}
        body = body | {"tools": [TOOLS[0], {"type": "function", "function": bad}]}
    request = chat(**body)
    with pytest.raises(ValidationError) as caught:
        door().grammar(form_of(request, served(tools="hermes")))
    error = request.in_its_words(caught.value)
    assert error.parameter == field and str(error).startswith(f"{field}: ")


def output(text, finish_reason="stop", prompt="?"):
    answer = CompletionOutput(0, text, [1] * len(text), finish_reason=finish_reason)
    return RequestOutput("1", prompt, [1, 2], None, [answer], finish_reason is not None)


def whole(text, request, model, reason="stop"):
    answer = answer_chat(request, "id", 1, [output(text, reason)], model)
    (choice,) = json.loads(msgspec.json.encode(answer))["choices"]
    return choice


def streamed(text, request, model, reason="stop"):
    stream = ChatStream(request, "id", 1, model)
    outputs = [output(letter, None) for letter in text] + [output("", reason)]
    return [
        choice
        for one in outputs
        for chunk in stream.take(0, one)
        for choice in json.loads(msgspec.json.encode(chunk))["choices"]
    ]


@pytest.mark.parametrize("reasoning", [None, "qwen3"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_calls_that_are_asked_for_come_out_without_a_parser(choice, reasoning):
    model, body = served(reasoning), {"tools": TOOLS, "tool_choice": choice}
    request = chat(**body)
    form = door().grammar(form_of(request, model))
    for seed in range(6):
        text = walk(form, seed)
        if text is None:
            continue
        before = "<think>Hm.</think>\n\n" if reasoning else ""
        found = whole(before + text, request, model)
        calls = found["message"]["tool_calls"]
        assert found["message"]["content"] is None and calls
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "get_weather":
                assert arguments["city"] in ("Paris", "Rome")
            else:
                assert call["function"]["name"] == "ping" and choice == "required"
        parts = streamed(before + text, chat(stream=True, **body), model)
        deltas = [part["delta"] for part in parts]
        assert not "".join(delta.get("content", "") for delta in deltas)
        pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
        for index, call in enumerate(calls):
            first, *rest = [piece for piece in pieces if piece["index"] == index]
            assert first["function"] == {"name": call["function"]["name"], "arguments": ""}
            assert len(rest) > 1
            streamed_arguments = "".join(piece["function"]["arguments"] for piece in rest)
            assert streamed_arguments == call["function"]["arguments"]
        ends = "tool_calls" if choice == "required" else "stop"
        assert parts[-1]["finish_reason"] == found["finish_reason"] == ends


def test_one_call_if_calls_may_not_be_parallel():
    model = served()
    several = '[{"name": "ping", "parameters": {}}, {"name": "ping", "parameters": {}}]'
    for parallel, allowed in ((None, True), (True, True), (False, False)):
        request = chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel)
        form = door().grammar(form_of(request, model))
        assert fits(form, several) is allowed
        assert fits(form, '[{"name": "ping", "parameters": {}}]')
        assert not fits(form, "[]") and not fits(form, '[{"name": "pong", "parameters": {}}]')


def test_a_format_of_the_content_does_not_bind_an_answer_of_calls():
    request = chat(tools=TOOLS, tool_choice="required", response_format={"type": "json_object"})
    assert form_of(request).kind == "structural_tag"


def test_an_answer_that_is_cut_off_says_so():
    request = chat(tools=TOOLS, tool_choice=NAMED)
    found = whole('{"city": "Pa', request, served(), "length")
    assert found["finish_reason"] == "length"
    assert found["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Pa'
    assert "tool_calls" not in whole("", request, served(), "length")["message"]


STRICT = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
MARKERS = {
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁calls▁end｜>"),
    "hermes": ("<tool_call>", "</tool_call>"),
    "internlm": ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
}


@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("name", [name for name, one in TOOL_FORMATS.items() if one.forms])
def test_strict_calls_follow_their_schemas(name, are_tokens):
    tokens = MARKERS.get(name, ()) if are_tokens else ()
    vocab = vocabulary(*tokens)
    model = served(tools=name)
    tag = form_of(chat(tools=STRICT), model).tag()
    if tag["format"]["type"] == "triggered_tags":
        tag["format"]["at_least_one"] = True  # so that random answers have calls
    else:
        del tag["format"]["elements"][-1]
    params = SamplingParams(structured_outputs={"structural_tag": json.dumps(tag)})
    form = door(*tokens).grammar(params.structured_outputs)
    tools, num_calls = list(map(Tool.of, STRICT)), 0
    for seed in range(4):
        text = walk(form, seed, vocab, most=150)
        if text is None:
            continue
        parsed = tool_parser(TOOL_FORMATS[name], tools).parse(text)
        assert parsed.tool_calls, text
        for call in parsed.tool_calls:
            num_calls += 1
            arguments = json.loads(call.arguments)
            if call.name == "get_weather":
                assert arguments["city"] in ("Paris", "Rome") and len(arguments) == 1, text
    assert num_calls


@pytest.mark.parametrize("name", [name for name, one in TOOL_FORMATS.items() if one.forms])
def test_a_strict_answer_may_be_text(name):
    form = door().grammar(form_of(chat(tools=STRICT), served(tools=name)))
    for text in ("", "It rains.", " So: {1} [2]"):
        assert fits(form, text), text
    one = door().grammar(form_of(chat(tools=STRICT, parallel_tool_calls=False), served(tools=name)))
    assert fits(one, "It rains.")


def test_a_function_that_is_not_strict_has_any_arguments():
    tools = [STRICT[0], {"type": "function", "function": {"name": "free", "parameters": SCHEMA}}]
    form = door().grammar(form_of(chat(tools=tools), served(tools="hermes")))

    def call(name, arguments):
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    assert fits(form, call("free", '{"x": 1}')) and fits(
        form, call("get_weather", '{"city":"Rome"}')
    )
    assert not fits(form, call("get_weather", '{"x": 1}'))
    assert form_of(chat(tools=TOOLS), served(tools="hermes")) is None


@pytest.mark.parametrize("name", [name for name, one in TOOL_FORMATS.items() if not one.forms])
def test_formats_without_json_cannot_be_strict(name):
    with pytest.raises(ValidationError, match=r"tools\[0\].function.strict=True"):
        chat(tools=STRICT).sampling_params(served(tools=name))


def test_strict_calls_and_a_format_of_the_content_exclude_each_other():
    with pytest.raises(ValidationError, match="tools="):
        form_of(chat(tools=STRICT, response_format={"type": "json_object"}), served(tools="hermes"))
