"""The functions that a request offers, of which some may be in namespaces.

The model reads and calls a function of a namespace as `namespace.name`, since chat templates and
formats of calls know one name only. Clients see the two apart.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxllm.errors import refused
from jaxllm.openai.tools import MAX_TOOLS


class ResponsesTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function of the client, or a namespace of such functions."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list["ResponsesTool"] | None = None


def chat_tools(tools: Sequence[ResponsesTool] | None) -> list[dict[str, Any]] | None:
    """The functions as a chat request has them. What follows looks at each of them, so that there
    must not be too many."""
    count = len(places_of(tools))
    if count > MAX_TOOLS:
        raise refused("tools", f"{count} tools", f"give 1 to {MAX_TOOLS}, or leave it out")
    found: list[dict[str, Any]] = []
    for place, tool in enumerate(tools or ()):
        where = f"tools[{place}]"
        if tool.type == "namespace":
            found += _of_namespace(tool, where)
        else:
            found.append(_function(tool, where))
    _check_names(found, tools or ())
    return found or None


def places_of(tools: Sequence[ResponsesTool] | None) -> list[str]:
    """Where each of `chat_tools` is in the request."""
    return [
        where
        for i, tool in enumerate(tools or ())
        for where in (
            [f"tools[{i}]"]
            if tool.tools is None
            else [f"tools[{i}].tools[{j}]" for j in range(len(tool.tools))]
        )
    ]


def with_namespaces(tools: Sequence[ResponsesTool] | None) -> dict[str, tuple[str, str]]:
    """What the model calls each function of a namespace -> the namespace and the name."""
    return {
        joined(space.name, tool.name): (space.name, tool.name)
        for space in tools or ()
        for tool in space.tools or ()
        if space.name is not None and tool.name is not None
    }


def joined(namespace: str, name: str) -> str:
    """What the model calls a function of a namespace."""
    return f"{namespace}.{name}"


def chat_tool_choice(choice: object) -> Any:
    match choice:
        case None | "none" | "auto" | "required":
            return choice
        case {"type": "function", "name": str(name), **others} if not others:
            return {"type": "function", "function": {"name": name}}
    raise refused(
        "tool_choice",
        choice,
        "use 'none', 'auto', 'required' or {'type': 'function', 'name': ...}",
    )


def _of_namespace(space: ResponsesTool, where: str) -> list[dict[str, Any]]:
    if not space.name:
        raise refused(f"{where}.name", space.name, "a namespace has a name")
    for field in ("parameters", "strict"):
        if getattr(space, field) is not None:
            raise refused(f"{where}.{field}", getattr(space, field), "a namespace has none")
    if not space.tools:
        raise refused(f"{where}.tools", space.tools, "a namespace has functions")
    found: list[dict[str, Any]] = []
    for place, tool in enumerate(space.tools):
        of_tool = _function(tool, f"{where}.tools[{place}]")
        function = of_tool["function"]
        function["name"] = joined(space.name, function["name"])
        texts = filter(None, (space.description, function.get("description")))
        if text := "\n\n".join(texts):
            function["description"] = text
        found.append(of_tool)
    return found


def _function(tool: ResponsesTool, where: str) -> dict[str, Any]:
    if tool.type != "function":
        why = "only functions of the client are supported; nothing here runs this tool"
        raise refused(f"{where}.type", tool.type, why)
    if not tool.name:
        raise refused(f"{where}.name", tool.name, "a function has a name")
    if tool.tools is not None:
        raise refused(f"{where}.tools", tool.tools, "only a namespace has functions")
    fields = ("name", "description", "parameters", "strict")
    function = {one: value for one in fields if (value := getattr(tool, one)) is not None}
    return {"type": "function", "function": function}


def _check_names(found: Sequence[dict[str, Any]], tools: Sequence[ResponsesTool]) -> None:
    """A call must say whose function it is: where namespaces are, no name may stand twice."""
    if all(tool.type != "namespace" for tool in tools):
        return
    seen: set[str] = set()
    for one in found:
        name = one["function"]["name"]
        if name in seen:
            raise refused("tools", name, "two functions have this name, namespaces included")
        seen.add(name)
