"""Finds schemas that no finite value fits, such as a node that requires a node.

A grammar of such a schema is sound, and its answer would go on until it is cut off.
"""

from collections.abc import Iterator
from typing import Any


def find_endless(root: dict[str, Any]) -> str | None:
    """The place of a reference without a finite value, if the whole schema has none."""
    targets = {ref: target for ref, target in _references(root)}
    # At first none is known to end. Those that need nothing else end; then those that need these.
    # A chain of references in either order takes one round.
    endless, last_num = set(targets), -1
    while len(endless) != last_num:
        last_num = len(endless)
        for ref in (*targets, *reversed(targets)):
            if ref in endless and not _is_endless(targets[ref], endless):
                endless.discard(ref)
    if not _is_endless(root, endless):
        return None
    return min(endless, default="#")


def _is_endless(schema: Any, endless: set[str]) -> bool:
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return False
    if schema.get("$ref") in endless:
        return True
    for name in ("anyOf", "oneOf"):
        several = schema.get(name)
        if isinstance(several, list) and several and all(_is_endless(s, endless) for s in several):
            return True
    parts = schema.get("allOf")
    if isinstance(parts, list) and any(_is_endless(part, endless) for part in parts):
        return True
    match schema.get("type"):
        case "object":
            properties, required = schema.get("properties"), schema.get("required")
            if not isinstance(properties, dict) or not isinstance(required, list):
                return False
            return any(_is_endless(properties.get(name), endless) for name in required)
        case "array":
            least = schema.get("minItems", 0)
            if not isinstance(least, int | float) or least < 1:
                return False
            first = schema.get("prefixItems")
            if isinstance(first, list) and first:
                return any(_is_endless(one, endless) for one in first[: int(least)])
            return _is_endless(schema.get("items"), endless)
        case _:
            return False


def _references(root: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The local references in a schema, wherever they are, and what they refer to."""
    waiting: list[Any] = [root]
    seen: set[str] = set()
    while waiting:
        node = waiting.pop()
        waiting += (
            node if isinstance(node, list) else node.values() if isinstance(node, dict) else ()
        )
        ref = node.get("$ref") if isinstance(node, dict) else None
        if isinstance(ref, str) and ref.startswith("#") and ref not in seen:
            seen.add(ref)
            yield ref, _target(root, ref)


def _target(root: Any, ref: str) -> Any:
    """What a JSON pointer refers to; True, which anything fits, if it is no pointer."""
    if ref == "#":
        return root
    if not ref.startswith("#/"):
        return True
    node = root
    for step in ref[2:].split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and step in node:
            node = node[step]
        elif isinstance(node, list) and step.isdigit() and int(step) < len(node):
            node = node[int(step)]
        else:
            return True
    return node
