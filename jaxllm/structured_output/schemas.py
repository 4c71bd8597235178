"""JSON schemas as the grammar takes them: with its options, and without what it would not follow.

The grammar refuses keywords that it cannot follow. The ones here it would follow only in part.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxllm.structured_output.endless import find_endless

# White space in JSON: one space after a comma and a colon, or none. Small models lose themselves in
# white space: with any of it, the bundled one ended none of eight answers within 200 tokens at
# temperature 0; with a line break and its indentation at each place six, in 137 tokens on average;
# so all eight, in 47.
_SEPARATORS = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
# Without \u: it could write the name of a property in another way, with a value of another schema.
_ESCAPES = 'nrbtf\\"'

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
        options: dict[str, Any] = {"json_allowed_escapes": _ESCAPES}
        if not self.any_whitespace:
            return options | {"whitespace_flexible": False}
        if self.whitespace_pattern is None:
            return options | _SEPARATORS
        return options | {"whitespace_pattern": self.whitespace_pattern}


def prepared(schema: Schema, options: JSONOptions) -> Schema:
    """Return the schema for the grammar; raise ValueError if it would be followed only in part."""
    if "x-guidance" in schema:
        raise ValueError("'x-guidance' is not supported; use the fields of structured_outputs")
    if _OLD_DRAFT.search(str(schema.get("$schema", ""))):
        raise ValueError(f"$schema={schema['$schema']!r} is too old; draft 4 and later are known")
    for place, one in _walk(schema, "#"):
        _check(place, one)
    endless = find_endless(schema)
    if endless is not None:
        raise ValueError(f"{endless}: no value ends, since it needs another one within it")
    return {"x-guidance": options.guidance} | _completed(
        schema, is_closed=not options.additional_properties
    )


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
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError(f"{place}/required must be a list of names")
    least = schema.get("minProperties", 0)
    if isinstance(least, int | float) and least > 1:
        # A name that is not in `properties` may come twice, and then counts once.
        if not isinstance(schema.get("properties"), dict) or least > len(set(required)):
            raise ValueError(
                f"{place}: minProperties={least} cannot be followed, since names may come twice; "
                "name the properties and require them"
            )


def _completed(schema: Any, *, is_closed: bool) -> Any:
    """Copy a schema, with days that the calendar has. With `is_closed`, objects that say nothing of
    other properties have none."""
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for name in _OF_ONE:
        if name in copy:
            copy[name] = _completed(copy[name], is_closed=is_closed)
    for name in _OF_LIST:
        if isinstance(copy.get(name), list):
            copy[name] = [_completed(one, is_closed=is_closed) for one in copy[name]]
    for name in _OF_NAMES:
        if isinstance(copy.get(name), dict):
            several = copy[name].items()
            copy[name] = {key: _completed(one, is_closed=is_closed) for key, one in several}
    if is_closed and isinstance(copy.get("properties"), dict):
        copy.setdefault("additionalProperties", False)
    if copy.get("format") in _DAYS and isinstance(copy.get("allOf", []), list):
        copy["allOf"] = [*copy.get("allOf", ()), {"pattern": _DAYS[copy["format"]]}]
    return copy


_OLD_DRAFT = re.compile(r"draft-0[0-3]\b")
# llguidance lets every year have a 29th of February.
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    f"^({_LEAP_YEAR}-02-29"
    "|([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-([0-9]{2}-[0-2][0-8]|[0-9]{2}-[01]9"
    "|(0[13-9]|1[0-2])-(29|3[01])))"
)
_DAYS = {"date": f"{_DAY}$", "date-time": f"{_DAY}[Tt]"}
