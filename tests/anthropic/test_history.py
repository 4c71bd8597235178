"""Conversations in Anthropic's form, as a chat template gets them."""

import pytest

from jaxllm.anthropic.history import read_history
from jaxllm.errors import ValidationError

HELLO = {"role": "user", "content": "Hello"}
SEEN = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}


def call(name="look", id="a", **given):
    return {"type": "tool_use", "id": id, "name": name, "input": given}


def result(id="a", content="Waves.", **more):
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


def text(text):
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def test_text_and_blocks_of_text_are_the_same():
    expected = [{"role": "system", "content": "Be\nbrief"}, {"role": "user", "content": "Hello"}]
    assert read_history("Be\nbrief", [HELLO]) == (expected, False)
    assert read_history([text("Be"), text("brief")], [user(text("Hello"))]) == (expected, False)
    assert read_history(None, [HELLO]).messages == expected[1:]


def test_calls_thoughts_and_results():
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    messages = [
        HELLO,
        assistant(thought, text("Wait."), call(at="sea"), call(id="b", name="hear")),
        user(result("b", [text("Wind.")], is_error=True), result(), text("Go on")),
    ]
    found, is_begun = read_history(None, messages)
    assert not is_begun
    answer, *results, last = found[1:]
    assert (answer["content"], answer["reasoning"]) == ("Wait.", "Hm.")
    assert [(one["id"], one["function"]) for one in answer["tool_calls"]] == [
        ("a", {"name": "look", "arguments": '{"at":"sea"}'}),
        ("b", {"name": "hear", "arguments": "{}"}),
    ]
    assert results == [
        {"role": "tool", "tool_call_id": "b", "content": "Error: Wind."},
        {"role": "tool", "tool_call_id": "a", "content": "Waves."},
    ]
    assert last == {"role": "user", "content": "Go on"}


def test_results_may_have_images():
    part = {"type": "image_url", "image_url": {"url": "https://a/b.png"}}
    shown = result("b", [SEEN, text("Waves.")], is_error=True)
    messages = [HELLO, assistant(call(), call(id="b")), user(result(content=[SEEN]), shown)]
    first, second = read_history(None, messages).messages[2:]
    assert first == {"role": "tool", "tool_call_id": "a", "content": [part]}
    texts = [{"type": "text", "text": "Error: "}, {"type": "text", "text": "Waves."}]
    assert second["content"] == [texts[0], part, texts[1]]


def test_turns_of_one_role_are_one_turn():
    messages = [HELLO, HELLO, assistant(text("Wa")), assistant(text("it"), call()), user(result())]
    found = read_history(None, messages).messages
    assert [one["role"] for one in found] == ["user", "assistant", "tool"]
    assert [one["content"] for one in found] == ["Hello\nHello", "Wait", "Waves."]
    assert len(found[1]["tool_calls"]) == 1


def test_results_and_the_next_question_may_be_two_messages():
    messages = [HELLO, assistant(call()), user(result()), HELLO]
    found = read_history(None, messages).messages
    assert [one["role"] for one in found] == ["user", "assistant", "tool", "user"]


def test_an_answer_may_be_begun():
    found, is_begun = read_history(None, [HELLO, {"role": "assistant", "content": "Well"}])
    assert is_begun and found[-1] == {"role": "assistant", "content": "Well"}


def test_a_document_of_text_is_text():
    source = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    found = read_history(
        None, [user({"type": "document", "source": source, "title": "Log"}, text("Why?"))]
    )
    assert found.messages == [{"role": "user", "content": "Log\nIt rains.\nWhy?"}]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        (["Hello"], "messages[0]"),
        ([{"role": "tool", "content": "a"}], "messages[0]"),
        ([{"role": "user"}], "messages[0]"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{**HELLO, "name": "Ann"}], "messages[0].name"),
        ([user("Hello")], "messages[0].content[0]"),
        ([user({"type": "text"})], "messages[0].content[0].text"),
        ([user({"type": "text", "text": "a", "more": 1})], "messages[0].content[0].more"),
        ([user({"type": "image", "source": {}})], "messages[0].content[0].source.type"),
        ([user({"type": "image"})], "messages[0].content[0].source"),
        ([user({"type": "document", "source": {"type": "base64"}})],
         "messages[0].content[0].source.type"),
        ([user(call())], "messages[0].content[0]"),
        ([assistant(result())], "messages[0].content[0]"),
        ([assistant({"type": "redacted_thinking", "data": "x"})], "messages[0].content[0]"),
        ([HELLO, assistant(call()), HELLO], "messages[1].content[0].id"),
        ([HELLO, assistant(call())], "messages[1].content[0].id"),
        ([HELLO, assistant(call()), assistant(text("a"))], "messages[1].content[0].id"),
        ([HELLO, assistant(call(), call(id="b")), user(result())], "messages[1].content[1].id"),
        ([user(result())], "messages[0].content[0].tool_use_id"),
        ([HELLO, assistant(call()), user(result(), result())],
         "messages[2].content[1].tool_use_id"),
        ([HELLO, assistant(call()), user(text("a"), result())], "messages[2].content[1]"),
        ([HELLO, assistant(call()), user(result(is_error="no"))],
         "messages[2].content[0].is_error"),
        ([HELLO, assistant(call()), user(result(content=[{"type": "image"}]))],
         "messages[2].content[0].content[0].source"),
        ([HELLO, assistant(call()), user(result(content=[SEEN, call()]))],
         "messages[2].content[0].content[1]"),
        ([HELLO, assistant(call()), user(result(content=[{"type": "document"}]))],
         "messages[2].content[0].content[0]"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_refused_by_its_place(messages, field):
    with pytest.raises(ValidationError) as caught:
        read_history(None, messages)
    assert caught.value.parameter == field
