"""JSON schemas as the grammar takes them: with its options, and without what it would not follow.

The grammar refuses keywords that it cannot follow. The ones here it would follow only in part.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

# White space at each place where JSON may have some: up to four spaces, or a line break and an
# indentation. Without a bound, small models may write line breaks for ever.
DEFAULT_WHITESPACE = r" {1,4}|\r?\n[ \t]{0,64}"

Schema = dict[str, Any]

_OF_ONE = (
    "additionalProperties", "additionalItems", "contains", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_OF_LIST = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_OF_NAMES = (
    "$defs", "definitions", "dependentSchemas", "patternProperties", "properties",
)  # fmt: skip


class JSONOptions(NamedTuple):
    """How JSON is written in an answer."""

    any_whitespace: bool = True
    whitespace_pattern: str | None = None  # in Rust's syntax
    additional_properties: bool = True  # where the schema does not say

    @property
    def guidance(self) -> dict[str, Any]:
        """The options in llguidance's words."""
        if not self.any_whitespace:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": self.whitespace_pattern or DEFAULT_WHITESPACE}


def prepared(schema: Schema, options: JSONOptions) -> Schema:
    """Return the schema for the grammar; raise ValueError if it would be followed only in part."""
    if "x-guidance" in schema:
        raise ValueError("'x-guidance' is not supported; use the fields of structured_outputs")
    for place, one in _walk(schema, "#"):
        _check(place, one)
    if not options.additional_properties:
        schema = _closed(schema)
    return {"x-guidance": options.guidance} | schema


def _walk(schema: object, place: str) -> Iterator[tuple[str, Schema]]:
    """Yield a schema and all inside it, with their places. Literal values are not schemas."""
    if not isinstance(schema, dict):
        return
    yield place, schema
    for name in _OF_ONE:
        yield from _walk(schema.get(name), f"{place}/{name}")
    for name in _OF_LIST:
        if isinstance(several := schema.get(name), list):
            for index, one in enumerate(several):
                yield from _walk(one, f"{place}/{name}/{index}")
    for name in _OF_NAMES:
        if isinstance(several := schema.get(name), dict):
            for key, one in several.items():
                yield from _walk(one, f"{place}/{name}/{key}")


def _check(place: str, schema: Schema) -> None:
    least = schema.get("minProperties", 0)
    if isinstance(least, int | float) and least > 1:
        # A name that is not in `properties` may come twice, and then counts once.
        named = schema.get("properties")
        required = schema.get("required")
        num = len(set(required)) if isinstance(required, list) else 0
        if not isinstance(named, dict) or least > num:
            raise ValueError(
                f"{place}: minProperties={least} cannot be followed, since names may come twice; "
                "name the properties and require them"
            )


def _closed(schema: Any) -> Any:
    """Copy a schema, and forbid other properties in objects that say nothing of them."""
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for name in _OF_ONE:
        if name in copy:
            copy[name] = _closed(copy[name])
    for name in _OF_LIST:
        if isinstance(copy.get(name), list):
            copy[name] = [_closed(one) for one in copy[name]]
    for name in _OF_NAMES:
        if isinstance(copy.get(name), dict):
            copy[name] = {key: _closed(one) for key, one in copy[name].items()}
    if isinstance(copy.get("properties"), dict):
        copy.setdefault("additionalProperties", False)
    return copy
