"""JSON schemas: answers fit them, or they are refused by what cannot be followed."""

import functools
import json

import jsonschema
import pytest

from jaxllm import ValidationError
from tests.structured_output.walks import fits, grammar, walk


def record(*required, **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


FOLLOWED = {
    "nested references": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": record(
                "value",
                value={"type": "integer"},
                children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            )
        },
    },
    "mutual references": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": record("b", b={"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}),
            "b": record("a", a={"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}),
        },
    },
    "a reference to the root": record("v", v={"type": "boolean"}, next={"$ref": "#"}),
    "any of several": {
        "anyOf": [
            {"type": "integer"},
            {"type": "string", "maxLength": 5},
            record("x", x={"const": 1}),
        ]
    },
    "disjoint one of": {
        "oneOf": [
            record("kind", kind={"const": "a"}, n={"type": "integer"}),
            record("kind", kind={"const": "b"}, s={"type": "string", "maxLength": 9}),
        ]
    },
    "one of types": {
        "oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 4}, {"type": "null"}]
    },
    "all of": {
        "allOf": [
            {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 3}},
                "required": ["a"],
            },
            {"type": "object", "properties": {"a": {"type": "integer", "maximum": 7}}},
        ]
    },
    "enum of kinds": {"enum": [1, "one", None, [1, 2], {"a": "b"}, 1.5, True]},
    "const of an object": {"const": {"a": [1, {"b": 'ü\n"q"'}]}},
    "unicode names": record(
        "größe", "数", **{"größe": {"enum": ["klein", "groß"]}, "数": {"type": "integer"}}
    ),
    "unicode enum": {"enum": ["日本語", "naïve", "emoji 😀", "tab\t", 'quote"', "back\\slash"]},
    "bounds of integers": {"type": "integer", "minimum": -17, "maximum": 1234},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "bounds of numbers": {"type": "number", "minimum": -0.25, "maximum": 99.5},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 6},
    "lengths of unicode": {"type": "string", "minLength": 2, "maxLength": 2},
    "a pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "a pattern without anchors": {"type": "string", "pattern": "ab+c", "maxLength": 12},
    "a pattern with classes": {"type": "string", "pattern": r"^\w+\s\d{2}$", "maxLength": 12},
    "an array of tuples": {
        "type": "array",
        "items": {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "string", "maxLength": 3}],
            "items": False,
            "minItems": 2,
        },
        "minItems": 1,
        "maxItems": 3,
    },
    "bounds of items": {
        "type": "array",
        "items": {"enum": ["a", "b"]},
        "minItems": 2,
        "maxItems": 4,
    },
    "an empty array": {"type": "array", "maxItems": 0},
    "additional properties of a type": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,3}$": {"type": "integer"}},
        "additionalProperties": False,
    },
    "optional properties": record("c", **{name: {"type": "boolean"} for name in "abcdefgh"}),
    "a nullable field": record("a", a={"type": ["string", "null"], "maxLength": 4}),
    "a type list": {"type": ["integer", "boolean", "null"]},
    "at least one property": {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": {"type": "integer"},
        "maxProperties": 2,
    },
    "a date": {"type": "string", "format": "date"},
    "a date and time": {"type": "string", "format": "date-time"},
    "a uuid": {"type": "string", "format": "uuid"},
    "an address of mail": {"type": "string", "format": "email", "maxLength": 30},
    "an ipv4 address": {"type": "string", "format": "ipv4"},
    "an ipv6 address": {"type": "string", "format": "ipv6"},
    "a hostname": {"type": "string", "format": "hostname", "maxLength": 20},
    "a time": {"type": "string", "format": "time"},
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"p": {"type": "integer", "minimum": 0}},
        "type": "object",
        "properties": {"n": {"$ref": "#/definitions/p"}},
        "required": ["n"],
        "additionalProperties": False,
    },
    "items of draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"type": "integer"}, {"type": "boolean"}],
        "additionalItems": False,
        "minItems": 2,
    },
    "required without properties": {
        "type": "object",
        "required": ["q"],
        "additionalProperties": {"type": "integer"},
        "maxProperties": 2,
    },
    "ten levels": functools.reduce(
        lambda inner, _: record("a", a=inner), range(10), {"type": "integer"}
    ),
    "a keyword's name as a property": record(
        "properties",
        "$ref",
        **{
            "properties": {"type": "integer"},
            "$ref": {"type": "boolean"},
            "enum": {"type": "null"},
        },
    ),
    "annotations": {
        "title": "T",
        "description": "D",
        "default": 1,
        "examples": [1],
        "deprecated": True,
        "type": "integer",
        "minimum": 5,
        "maximum": 5,
    },
    "a true schema": record("a", a=True),
}
REFUSED = {
    "one of that may overlap": (
        {"oneOf": [{"type": "string", "maxLength": 5}, {"type": "string", "minLength": 3}]},
        "oneOf",
    ),
    "not": ({"not": {"type": "string"}}, "not"),
    "if": (
        {"type": "object", "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
        "if",
    ),
    "uniqueItems": (
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "uniqueItems",
    ),
    "contains": ({"type": "array", "contains": {"const": 1}}, "contains"),
    "dependentRequired": (
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        "dependentRequired",
    ),
    "dependencies": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "dependencies": {"a": ["b"]},
        },
        "dependencies",
    ),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
    "unevaluatedProperties": (
        {"type": "object", "unevaluatedProperties": False},
        "unevaluatedProperties",
    ),
    "minProperties": (
        {"type": "object", "minProperties": 3, "additionalProperties": {"type": "integer"}},
        "minProperties=3",
    ),
    "look-ahead": ({"type": "string", "pattern": "^(?=a)b"}, "look-around"),
    "backreference": ({"type": "string", "pattern": "(a)\\1"}, "backreferences"),
    "unknown format": ({"type": "string", "format": "iban"}, "iban"),
    "remote ref": ({"$ref": "https://example.com/x.json"}, "example.com"),
    "missing ref": ({"$ref": "#/$defs/none"}, "/$defs/none"),
    "self ref": ({"$ref": "#"}, "no value ends"),
    "ref loop": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "no value ends",
    ),
    "recursive required": (
        {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": {
                    "type": "object",
                    "properties": {"b": {"$ref": "#/$defs/a"}},
                    "required": ["b"],
                    "additionalProperties": False,
                }
            },
        },
        "no value ends",
    ),
    "dynamicRef": (
        {"$dynamicRef": "#x", "$defs": {"a": {"$dynamicAnchor": "x", "type": "integer"}}},
        "dynamicRef",
    ),
    "unsatisfiable": ({"type": "integer", "minimum": 5, "maximum": 4}, "minimum (5)"),
    "false": ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "unsatisfiable"),
    "wrong type word": ({"type": "strnig"}, "strnig"),
    "wrong enum": ({"enum": "a"}, "enum must be"),
    "wrong properties": ({"type": "object", "properties": [1]}, "properties must be"),
    "overlapping patterns": (
        {
            "type": "object",
            "patternProperties": {"^a": {"type": "integer"}, "a$": {"type": "string"}},
        },
        "not disjoint",
    ),
    "min > max len": ({"type": "string", "minLength": 5, "maxLength": 4}, "minLength (5)"),
    "x-guidance": ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance"),
    "draft3 required": (
        {
            "$schema": "http://json-schema.org/draft-03/schema#",
            "type": "object",
            "properties": {"a": {"type": "integer", "required": True}},
        },
        "too old",
    ),
    "maxProps named": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "maxProperties": 1,
        },
        "maxProperties",
    ),
    "a property required by itself": (
        {"type": "object", "properties": {"a": {"type": "integer", "required": True}}},
        "#/properties/a/required",
    ),
}


def check(schema, value):
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(value)


@pytest.mark.parametrize("name", FOLLOWED)
def test_every_answer_fits_its_schema(name):
    schema = FOLLOWED[name]
    form = grammar(json=schema)
    answers = [answer for seed in range(4) if (answer := walk(form, seed, most=150)) is not None]
    assert answers, "no answer has ended"
    for answer in answers:
        check(schema, json.loads(answer))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused(name):
    schema, why = REFUSED[name]
    with pytest.raises(ValidationError) as caught:
        grammar(json=schema)
    assert why in str(caught.value) and caught.value.parameter == "structured_outputs.json"


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        # The same name, written in another way, would have another schema.
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"\\u0061": "x"}'),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a": 1, "a": "x"}'),
        ({"format": "date", "type": "string"}, '"2023-02-29"'),
        ({"format": "date", "type": "string"}, '"1900-02-29"'),
        ({"format": "date-time", "type": "string"}, '"2023-06-31T00:00:00Z"'),
        ({"patternProperties": {"^x": {"type": "null"}}, "type": "object"}, '{"x": 1}'),
        ({"type": "integer", "enum": [1, "a"]}, '"a"'),
        ({"type": "integer"}, "1.5"),
        ({"type": "string", "maxLength": 1}, '"ab"'),
    ],
)
def test_what_does_not_fit_is_never_allowed(schema, answer):
    assert not fits(grammar(json=schema), answer)


@pytest.mark.parametrize(
    "day", ["2000-02-29", "2024-02-29", "2023-02-28", "1999-12-31", "2023-06-30"]
)
def test_all_days_of_the_calendar_are_allowed(day):
    assert fits(grammar(json={"type": "string", "format": "date"}), f'"{day}"')


def test_white_space_is_bounded_unless_a_pattern_says_otherwise():
    schema = record("a", a={"type": "integer"})
    usual = grammar(json=schema)
    assert fits(usual, '{"a":1}') and fits(usual, '{"a": 1}')
    for answer in ('{"a":  1}', '{ "a":1}', '{"a" :1}', '{"a":1\n}', '{"a":\n1}'):
        assert not fits(usual, answer)
    compact = grammar(json=schema, disable_any_whitespace=True)
    assert fits(compact, '{"a":1}') and not fits(compact, '{"a": 1}')
    own = grammar(json=schema, whitespace_pattern=r"[\n ]?")
    assert fits(own, '{"a":1}') and fits(own, '{\n"a": 1}') and not fits(own, '{"a":  1}')


def test_other_properties_are_as_the_schema_says():
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}}
    answer = '{"a":{"x":1},"y":2}'
    assert fits(grammar(json=schema), answer)
    closed = grammar(json=schema, disable_additional_properties=True)
    assert fits(closed, '{"a":{}}')
    assert not fits(closed, answer) and not fits(closed, '{"a":{"x":1}}')


def test_any_object_is_an_object():
    form = grammar(json_object=True)
    assert fits(form, '{"a": [1, {"b": null}]}') and not fits(form, "[1]") and not fits(form, "1")


HOSTILE = {
    "an enum of 20,000 words": {"enum": [f"word {i}" for i in range(20_000)]},
    "a thousand optional properties": record(**{f"p{i}": {"type": "null"} for i in range(1000)}),
    "a repeated repetition": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    "a quantifier in a quantifier": {"type": "string", "pattern": "^(a+)+b$"},
    "a long string": {"type": "string", "maxLength": 1_000_000},
    "many items": {"type": "array", "items": {"type": "integer"}, "minItems": 10_000},
    "a chain of references": {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1000)}
        | {"d1000": {"type": "integer"}},
    },
    "products of branches": {
        "allOf": [{"anyOf": [{"minimum": i * j} for i in range(6)]} for j in range(8)]
    },
    "doubled references": {
        "$ref": "#/$defs/d0",
        "$defs": {
            f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
            for i in range(30)
        }
        | {"d30": {"type": "integer"}},
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_end(name):
    try:
        walk(grammar(json=HOSTILE[name]), 0, most=20)
    except ValidationError as error:
        assert error.parameter == "structured_outputs.json"
