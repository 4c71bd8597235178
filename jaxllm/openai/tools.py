"""The tools that a chat request offers to the model."""

import re
from typing import Any, Literal

import msgspec

from jaxllm.errors import ValidationError, refused
from jaxllm.parsers.tools.base import ToolFormat

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 1 << 20  # of all of them, as JSON
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Function(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function, and the JSON schema of its parameters."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool; every tool is a function."""

    type: Literal["function"]
    function: Function


def named_tool(choice: object) -> str | None:
    """The function that a `tool_choice` names; None if it is a word. Raise for another one."""
    match choice:
        case None | "none" | "auto" | "required":
            return None
        case {"type": "function", "function": {"name": str(name), **others}, **more}:
            if not others and not more:
                return name
    raise refused(
        "tool_choice",
        choice,
        "use 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}",
    )


def offered_tools(
    tools: list[Tool] | None, choice: object, can_parse: bool
) -> list[dict[str, Any]] | None:
    """Return the tools that the model may call, in the form for chat templates, or None. Refuse
    tools that cannot be served."""
    name = named_tool(choice)
    if tools is None:
        if choice not in (None, "none", "auto"):
            raise refused("tool_choice", choice, "there are no tools to call; give some")
        return None  # "auto" without tools calls none
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise refused("tools", f"{len(tools)} tools", f"give 1 to {MAX_TOOLS}, or leave it out")
    size = len(msgspec.json.encode(tools))
    if size > MAX_TOOLS_BYTES:
        raise refused("tools", f"{size} bytes", f"at most {MAX_TOOLS_BYTES} are allowed")
    for place, tool in enumerate(tools):
        where = f"tools[{place}].function"
        if not _NAME.fullmatch(tool.function.name):
            raise refused(
                f"{where}.name",
                tool.function.name,
                "a name has 1 to 64 letters, digits, '_', '-' and '.'",
            )
    if name is not None and name not in (tool.function.name for tool in tools):
        raise refused("tool_choice", name, "none of the tools has this name")
    if choice == "none":
        return None
    if choice in (None, "auto") and not can_parse:
        raise ValidationError(
            "tools: nobody looks for calls of tools here; start with --enable-auto-tool-choice and "
            "--tool-call-parser, or give tool_choice='none'",
            parameter="tools",
        )
    return [msgspec.to_builtins(tool) for tool in tools]


def check_can_be_strict(tools: list[Tool], calls: ToolFormat) -> None:
    """Refuse strict functions if the calls of this format are not JSON."""
    if not calls.forms:
        place = next(place for place, tool in enumerate(tools) if tool.function.strict)
        raise refused(
            f"tools[{place}].function.strict",
            True,
            "calls in the format of --tool-call-parser cannot be held to a schema; leave it out, "
            "or give tool_choice='required'",
        )
