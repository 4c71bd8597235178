"""Items as a chat template gets them, requests as chat requests, and the store of responses."""

import msgspec
import pytest

from jaxllm.errors import ValidationError
from jaxllm.openai.errors import NotFoundError
from jaxllm.openai.responses.endpoint import responses_endpoint
from jaxllm.openai.responses.history import read_items, with_instructions
from jaxllm.openai.responses.store import IN_MEMORY, ResponseStore

HELLO = {"role": "user", "content": "Hello"}
BODY = {"model": "tiny", "input": "Hello"}
LOOK = {"type": "function", "name": "look", "description": "Look somewhere."}
SEA = {"type": "namespace", "name": "sea", "description": "At the sea.", "tools": [LOOK]}


def call(id="a", **more):
    return {"type": "function_call", "call_id": id, "name": "look", "arguments": "{}"} | more


def output(id="a", output="Waves."):
    return {"type": "function_call_output", "call_id": id, "output": output}


def message(role, *parts):
    kind = "output_text" if role == "assistant" else "input_text"
    content = [{"type": kind, "text": part} for part in parts]
    return {"type": "message", "role": role, "content": content}


def reasoning(text):
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}


def test_a_turn_of_the_model_is_one_message():
    items = [HELLO, reasoning("Hm."), message("assistant", "Wait."), call(), call("b"), output("b"),
             output(), message("user", "And", "now?")]  # fmt: skip
    user, answer, *outputs, last = read_items(items)
    assert user == HELLO and last == {"role": "user", "content": "And\nnow?"}
    assert (answer["role"], answer["content"]) == ("assistant", "Wait.")
    assert answer["reasoning"] == "Hm."
    assert [one["id"] for one in answer["tool_calls"]] == ["a", "b"]
    assert [one["tool_call_id"] for one in outputs] == ["b", "a"]


def test_outputs_may_have_images():
    given = [{"type": "input_text", "text": "Here:"}, {"type": "input_image", "image_url": "u"}]
    items = [HELLO, call(), output(output=given)]
    assert read_items(items)[-1]["content"] == [{"type": "text", "text": "Here:"}, given[1]]


def test_the_words_of_system_and_developer_come_first():
    messages = read_items([message("developer", "Be brief"), HELLO])
    assert with_instructions("Be kind", messages) == [
        {"role": "system", "content": "Be kind\n\nBe brief"},
        HELLO,
    ]
    assert with_instructions(None, [HELLO]) == [HELLO]


@pytest.mark.parametrize(
    ("items", "field"),
    [
        (["Hello"], "input[0]"),
        ([{"type": "item_reference", "id": "x"}], "input[0].type"),
        ([{"type": "web_search_call"}], "input[0].type"),
        ([{"role": "tool", "content": "a"}], "input[0].role"),
        ([HELLO | {"name": "Ann"}], "input[0].name"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].image_url"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user"}], "input[0].content"),
        ([reasoning("a") | {"encrypted_content": "x"}], "input[0].encrypted_content"),
        ([HELLO, call()], "input[1].call_id"),
        ([HELLO, call(), HELLO], "input[1].call_id"),
        ([HELLO, call(), output("b")], "input[2].call_id"),
        ([HELLO, call(), output(), output()], "input[3].call_id"),
        ([HELLO, call(arguments="{")], "input[1].arguments"),
        ([HELLO, call(namespace="")], "input[1].namespace"),
        ([HELLO, call(arguments="[]")], "input[1].arguments"),
        ([HELLO, call(), output(output=5)], "input[2].output"),
        ([HELLO, call(), output(output=[{"type": "input_image"}])], "input[2].output[0].image_url"),
    ],
)
def test_what_cannot_be_said_is_refused_by_its_place(items, field):
    with pytest.raises(ValidationError) as caught:
        read_items(items)
    assert caught.value.parameter == field


def test_a_function_of_a_namespace_has_the_model_s_name_for_it():
    body = BODY | {"tools": [LOOK, SEA], "client_metadata": {"session": "a"}}
    chat = responses_endpoint(None).request.read(body).chat
    functions = [tool.function for tool in chat.tools]
    assert [one.name for one in functions] == ["look", "sea.look"]
    assert functions[1].description == "At the sea.\n\nLook somewhere."
    (_, answer, _) = read_items([HELLO, call(namespace="sea"), output()])
    assert answer["tool_calls"][0]["function"]["name"] == "sea.look"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input": []}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [SEA | {"name": ""}]}, "tools[0].name"),
        ({"tools": [SEA | {"tools": [LOOK | {"name": ""}]}]}, "tools[0].tools[0].name"),
        ({"tools": [SEA | {"tools": [LOOK] * 100_000}]}, "tools"),
        ({"tools": [SEA | {"strict": True}]}, "tools[0].strict"),
        ({"tools": [SEA | {"tools": []}]}, "tools[0].tools"),
        ({"tools": [SEA | {"tools": [LOOK, SEA]}]}, "tools[0].tools[1].type"),
        ({"tools": [LOOK | {"tools": [LOOK]}]}, "tools[0].tools"),
        ({"tools": [LOOK | {"name": "sea.look"}, SEA]}, "tools"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"truncation": "last"}, "truncation"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, field):
    with pytest.raises(ValidationError) as caught:
        responses_endpoint(None).request.read(BODY | changes)
    assert caught.value.parameter == field


def test_a_request_becomes_a_chat_request():
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    request = responses_endpoint(None).request.read(
        BODY
        | {
            "instructions": "Be brief",
            "max_output_tokens": 9,
            "tools": [tool],
            "tool_choice": {"type": "function", "name": "look"},
            "text": {"format": form, "verbosity": "medium"},
            "reasoning": {"effort": "none", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "metadata": {"a": "b"},
        }
    )
    chat = request.chat
    assert [one["role"] for one in chat.messages] == ["system", "user"]
    assert chat.max_completion_tokens == 9
    assert (chat.tools[0].function.name, chat.tools[0].function.strict) == ("look", True)
    assert chat.tool_choice == {"type": "function", "function": {"name": "look"}}
    assert chat.response_format.json_schema.schema == {"type": "object"}
    kwargs = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert chat.chat_template_kwargs == kwargs


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"background": True, "stream": True}, "stream"),
     ({"background": True, "store": False}, "background")],
)  # fmt: skip
def test_a_background_response_is_read_from_the_store_and_not_streamed(changes, field):
    store = ResponseStore(IN_MEMORY, max_bytes=1000)
    with pytest.raises(ValidationError) as caught:
        responses_endpoint(store).request.read(BODY | changes, live=True)
    assert caught.value.parameter == field


class Late(msgspec.Struct):
    status: str
    output: list[str] = []
    background: bool = True


@pytest.mark.parametrize("how", ["end", "cancel", "delete", "restart"])
def test_a_response_in_progress_ends_once(how):
    store = ResponseStore(IN_MEMORY, max_bytes=10_000)
    store.put("a", Late("in_progress"), [HELLO])
    assert store.get("a", "id").is_in_progress and store.get("a", "id").is_background
    {"cancel": lambda: store.cancel("a"), "delete": lambda: store.delete("a", "id"),
     "restart": store.end_lost, "end": lambda: None}[how]()  # fmt: skip
    store.end("a", Late("completed", ["text"]))
    store.cancel("a")
    store.end_lost()
    if how == "delete":
        with pytest.raises(NotFoundError):
            store.get("a", "id")
        return
    found = msgspec.json.decode(store.get("a", "id").response)
    status = {"end": "completed", "cancel": "cancelled", "restart": "failed"}[how]
    assert found["status"] == status
    assert found["output"] == store.get("a", "id").output == (["text"] if how == "end" else [])


class Answer(msgspec.Struct):
    output: list[str]


@pytest.mark.parametrize("place", [IN_MEMORY, "file"])
def test_a_store_keeps_what_was_used_last(tmp_path, place):
    path = IN_MEMORY if place == IN_MEMORY else str(tmp_path / "responses.db")
    store = ResponseStore(path, max_bytes=300)
    for name in "ab":
        store.put(name, Answer([name * 40]), [HELLO])
    assert store.get("a", "id").output == ["a" * 40]
    store.put("c", Answer(["c" * 40]), [])  # now it is too much
    with pytest.raises(NotFoundError, match="id='b'"):
        store.get("b", "id")
    assert store.get("a", "id").before == [HELLO]
    store.delete("a", "id")
    with pytest.raises(NotFoundError):
        store.delete("a", "id")
    store.close()
    if place != IN_MEMORY:
        assert (tmp_path / "responses.db").stat().st_mode & 0o777 == 0o600
        again = ResponseStore(path, max_bytes=300)
        assert msgspec.json.decode(again.get("c", "id").response) == {"output": ["c" * 40]}


def test_a_file_that_is_no_store_is_refused(tmp_path):
    (tmp_path / "a").write_text("nothing that SQLite has written, for a page or so" * 100)
    with pytest.raises(ValidationError, match="response_store"):
        ResponseStore(str(tmp_path / "a"), max_bytes=100)
