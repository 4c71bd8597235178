import pytest

from jaxllm.parsers.deltas import ArgumentsDelta

FORMAT = "deepseek_v3"


def fenced(name, arguments):
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜>"
    )


def plain(name, arguments):
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def calls(*parts):
    return "<｜tool▁calls▁begin｜>" + "\n".join(parts) + "<｜tool▁calls▁end｜>"


@pytest.mark.parametrize("write", [fenced, plain])
def test_several_calls_and_text(parse, write):
    arguments = '{"a": "``` <｜tool▁call▁end｜> }"}'

    parsed = parse("I look." + calls(write("f", arguments), write("g", "{}")) + " Done.")

    assert parsed.content == "I look. Done."
    assert parsed.calls == [("f", arguments), ("g", "{}")]


def test_arguments_stream(stream):
    parser = stream("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n")

    assert parser.feed('{"a')[-1] == ArgumentsDelta(0, '{"a')
    assert parser.feed('": 1}') == [ArgumentsDelta(0, '": 1}')]
    assert parser.feed("\n```<｜tool▁call▁end｜>") == []


def test_arguments_without_end_end_with_the_call(parse):
    parsed = parse(calls(plain("f", '{"a": [')))

    assert parsed.calls == [("f", '{"a": [')]
    assert parsed.content == ""


def test_what_is_no_call_is_content(parse):
    for text in [calls(), calls("hello"), calls(plain("f", "x")), calls(plain("", "{}"))]:
        parsed = parse(text)
        assert parsed.content == text
        assert parsed.calls == []


def test_a_second_call_that_is_none(parse):
    parsed = parse(calls(plain("f", "{}"), "hello"))

    assert parsed.calls == [("f", "{}")]
    assert parsed.content == "\nhello<｜tool▁calls▁end｜>"
