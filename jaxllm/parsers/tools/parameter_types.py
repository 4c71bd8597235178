"""Converts arguments that are written as plain text to JSON, by the types of the tool's schema."""

import json
import re
from collections.abc import Mapping, Sequence

from jaxllm.parsers.tools.base import Tool

NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
CONSTANTS = {"True": "true", "False": "false", "None": "null"}
CONSTANTS |= {word: word for word in CONSTANTS.values()}  # models mix the two notations up

_MAX_SCHEMA_DEPTH = 8  # of nested alternatives and references
_TYPE_OF = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_STRING = frozenset({"string"})


def parameter_types(tools: Sequence[Tool], function: str) -> dict[str, frozenset[str]]:
    """The JSON types of a function's parameters, by its schema; a string if it gives none."""
    for tool in tools:
        properties = tool.parameters.get("properties")
        if tool.name == function and isinstance(properties, Mapping):
            return {
                str(name): frozenset(_types(schema, tool.parameters, _MAX_SCHEMA_DEPTH)) or _STRING
                for name, schema in properties.items()
            }
    return {}


def to_json(value: str, types: frozenset[str]) -> str:
    """Write a value as JSON of one of these types, or as a string if no other type fits.

    Constants may be written as in Python, because chat templates show them to the model like that.
    """
    word = value.strip()
    lower = word.lower()
    if lower in ("null", "none") and ("null" in types or "string" not in types):
        return "null"
    if lower in ("true", "false") and "boolean" in types:
        return lower
    if types & {"integer", "number"} and NUMBER.fullmatch(word):
        return word
    if types & {"object", "array"} and word[:1] in ("{", "[") and _is_json(word):
        return word
    return quote(value)


def quote(text: str) -> str:
    """Write text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _types(schema: object, root: Mapping[str, object], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or not depth:
        return set()
    found: set[str] = set()
    declared = schema.get("type")
    for name in declared if isinstance(declared, list) else [declared]:
        if isinstance(name, str):
            found.add(name)
    values = schema.get("enum")
    for value in values if isinstance(values, list) else []:
        found |= {_TYPE_OF[type(value)]} if type(value) in _TYPE_OF else set()
    for key in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(key)
        for alternative in alternatives if isinstance(alternatives, list) else []:
            found |= _types(alternative, root, depth - 1)
    if "$ref" in schema:
        found |= _types(_resolve(schema["$ref"], root), root, depth - 1)
    return found


def _resolve(reference: object, root: Mapping[str, object]) -> object:
    """Resolve a reference of the form "#/$defs/Name"; None for other references."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: object = root
    for key in reference[2:].split("/"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity are not JSON
