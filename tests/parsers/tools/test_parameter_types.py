import json

import pytest

from jaxllm.parsers.tools.base import Tool
from jaxllm.parsers.tools.parameter_types import parameter_types, to_json


def types_of(schema, **root):
    tool = Tool("f", {"properties": {"x": schema}, **root})
    return parameter_types([Tool("g", {}), tool], "f")["x"]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, {"number", "null"}),
        ({"oneOf": [{"allOf": [{"type": "array"}]}, {"enum": [1, None]}]},
         {"array", "integer", "null"}),
        ({"$ref": "#/$defs/Point"}, {"object"}),
        ({"$ref": "https://example.com/schema"}, {"string"}),
        ({"$ref": "#/properties/x"}, {"string"}),
        ({"type": 3, "anyOf": "x", "enum": {}}, {"string"}),
        ({}, {"string"}),
        (True, {"string"}),
    ],
)  # fmt: skip
def test_types_of_a_schema(schema, expected):
    assert types_of(schema, **{"$defs": {"Point": {"type": "object"}}}) == expected


def test_a_function_that_is_not_offered_has_no_types():
    assert parameter_types([Tool("f", {"properties": "x"})], "f") == {}
    assert parameter_types([], "f") == {}


@pytest.mark.parametrize(
    ("value", "types", "expected"),
    [
        ("3", {"integer"}, "3"),
        (" -2.5e3 ", {"number"}, "-2.5e3"),
        ("03", {"integer"}, '"03"'),
        ("1e999", {"number", "string"}, "1e999"),
        ("NaN", {"number"}, '"NaN"'),
        ("True", {"boolean"}, "true"),
        ("None", {"integer"}, "null"),
        ("null", {"string", "null"}, "null"),
        ("null", {"string", "integer"}, '"null"'),
        ('{"a": [1]}', {"object"}, '{"a": [1]}'),
        ("[NaN]", {"array"}, '"[NaN]"'),
        ("{'a': 1}", {"object"}, "\"{'a': 1}\""),
        ("é\n", {"object"}, '"é\\n"'),
    ],
)
def test_to_json(value, types, expected):
    assert to_json(value, frozenset(types)) == expected


def test_deep_nesting_stays_a_string():
    value = "[" * 100_000

    assert json.loads(to_json(value, frozenset({"array"}))) == value
