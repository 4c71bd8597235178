"""Structural tags: free text in which pieces have a form."""

import json

import pytest

from jaxllm import StructuredOutputsParams, ValidationError
from tests.structured_output.walks import door, fits, grammar, vocabulary, walk

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
WRONG = {"type": "json_schema", "json_schema": {"not": {}}}
OLDER = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": ""},
    ],
    "triggers": ["<f="],
}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def newer(**form):
    return {"type": "structural_tag", "format": form}


def form_of(given):
    return grammar(structural_tag=json.dumps(given))


@pytest.mark.parametrize(
    ("given", "answers", "others"),
    [
        (
            OLDER,
            ["", "text", "a <f=a>12</f> b <f=b>true", "<f", "<f=b>false<f=a>0</f>"],
            ["<f=", "<f=c>", "<f=a>x</f>", "<f=a>1", "x <f=b>1"],
        ),
        (newer(type="const_string", value='say "x"\n'), ['say "x"\n'], ["say", ""]),
        (newer(type="regex", pattern=r"^\d$"), ["1"], ["", "12"]),
        (newer(type="grammar", grammar='root ::= "(" root ")" | "x"'), ["((x))"], ["(x"]),
        (newer(type="any_text"), ["", "all\nof it"], []),
        (newer(type="any_text", excludes=["no", "."]), ["n o"], ["a no", "x."]),
        (
            newer(type="or", elements=[NUMBER, {"type": "const_string", "value": "none"}]),
            ["5", "none"],
            ["x", "5none"],
        ),
        (
            newer(
                type="sequence",
                elements=[{"type": "any_text"}, {"type": "const_string", "value": "=> "}, NUMBER],
            ),
            ["so => 4", "=> 4"],
            ["4", "=> x", "=> 4 => 5"],
        ),
        (
            newer(**tag("<t>", {"type": "any_text"}, "</t>")),
            ["<t></t>", "<t>a <b> c</t>"],
            ["<t>", "<t>a</t>b</t>"],
        ),
        (
            newer(type="triggered_tags", triggers=["<"], tags=[tag("<n>", NUMBER, "</n>")]),
            ["", "a", "a <n>1</n> b", "<n>1</n><n>2</n>"],
            ["<x", "a <"],
        ),
        (
            newer(
                type="triggered_tags",
                triggers=["<n>"],
                tags=[tag("<n>", NUMBER, "</n>")],
                at_least_one=True,
            ),
            ["<n>1</n>", "<n>1</n> b <n>2</n>"],
            ["", "a <n>1</n>"],
        ),
        (
            newer(
                type="triggered_tags",
                triggers=["<n>"],
                tags=[tag("<n>", NUMBER, "</n>")],
                stop_after_first=True,
                excludes=["!"],
            ),
            ["a", "a <n>1</n>"],
            ["<n>1</n> ", "a! <n>1</n>", "a!"],
        ),
        (
            newer(
                type="tags_with_separator",
                tags=[tag("<a>", NUMBER, ";"), tag("<b>", NUMBER, ";")],
                separator=", ",
            ),
            ["", "<a>1;", "<a>1;, <b>2;"],
            [", <a>1;", "<a>1;,", "<a>1;<b>2;"],
        ),
        (
            newer(
                type="tags_with_separator",
                tags=[tag("<a>", NUMBER, ";")],
                separator="",
                at_least_one=True,
                stop_after_first=True,
            ),
            ["<a>1;"],
            ["", "<a>1;<a>1;"],
        ),
    ],
)
def test_what_is_allowed(given, answers, others):
    form = form_of(given)
    assert [answer for answer in answers if not fits(form, answer)] == []
    assert [other for other in others if fits(form, other)] == []
    for seed in range(2):
        answer = walk(form, seed, most=60)
        assert answer is None or fits(form, answer), answer


def test_special_tokens_are_tokens_and_not_letters():
    names = ("<call>", "</call>")
    given = newer(
        type="triggered_tags", triggers=["<call>"], tags=[tag("<call>f ", NUMBER, "</call>")]
    )
    params = StructuredOutputsParams(structural_tag=json.dumps(given))
    form = door(*names).grammar(params)
    vocab = vocabulary(*names)
    assert fits(form, "so <call>f 12</call> and", vocab)
    assert not fits(form, "so <call>x", vocab)
    assert "[4096]" in form and "[4097]" in form


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"a": 1}, ".a"),
        ({"type": "structural_tag"}, ""),
        (newer(type="qwen_xml_parameter", json_schema={}), ".format.type"),
        (newer(type="const_string", value=""), ".format.value"),
        (newer(type="const_string", value="a", more=1), ".format.more"),
        (newer(type="json_schema", json_schema={"not": {}}), ".format.json_schema"),
        (newer(type="json_schema", json_schema=[]), ".format.json_schema"),
        (newer(type="regex", pattern="(?=a)"), ".format.pattern"),
        (newer(type="grammar", grammar="root ::= x"), ".format.grammar"),
        (newer(type="or", elements=[]), ".format.elements"),
        (newer(type="or", elements=[NUMBER, {"type": "or"}]), ".format.elements[1].elements"),
        (
            newer(type="sequence", elements=[{"type": "any_text"}, NUMBER]),
            ".format.elements[1]",
        ),
        (newer(**tag("<a>", NUMBER, None)), ".format.end"),
        (newer(**tag("<a>", NUMBER, ["a", "b"])), ".format.end"),
        (newer(**tag("<a>", {"type": "json_schema"}, "")), ".format.content.json_schema"),
        (
            newer(type="triggered_tags", triggers=["x"], tags=[tag("<a>", NUMBER, "")]),
            ".format",
        ),
        (
            newer(type="triggered_tags", triggers=[1], tags=[tag("<a>", NUMBER, "")]),
            ".format.triggers",
        ),
        (
            newer(type="tags_with_separator", tags=[3], separator=""),
            ".format.tags[0]",
        ),
        (
            newer(
                type="tags_with_separator",
                tags=[tag("a", NUMBER, ""), tag("b", WRONG, "")],
                separator="",
            ),
            ".format.tags[1].content.json_schema",
        ),
        ({"structures": [], "triggers": ["a"]}, ".structures"),
        ({"structures": [{"begin": "b", "schema": {}, "end": ""}], "triggers": ["a"]}, ""),
        (
            {"structures": [{"begin": "a", "schema": {"type": "x"}, "end": ""}], "triggers": ["a"]},
            ".structures[0].schema",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_its_place(given, field):
    with pytest.raises(ValidationError) as caught:
        form_of(given)
    assert caught.value.parameter == f"structured_outputs.structural_tag{field}"
    assert str(caught.value).startswith(f"{caught.value.parameter}: ")
