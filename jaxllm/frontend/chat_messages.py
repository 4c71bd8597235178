"""Messages of the OpenAI API in the form that chat templates expect."""

import json
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import refused
from jaxllm.media.chat import IMAGE, VIDEO

# How protocols call an answer's reasoning: vLLM's name, and that of most templates.
_REASONING = ("reasoning", "reasoning_content")


def plain_message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Turn a message of the OpenAI API into the form that templates expect. Errors call the message
    `name`."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise refused(name, message, "it must be a dict with 'role' and 'content'")
    plain = dict(message)
    if plain.get("content") is None:
        plain["content"] = ""  # templates would write "None"
    elif isinstance(plain["content"], list):
        plain["content"] = _plain_content(plain["content"], f"{name}.content")
    elif not isinstance(plain["content"], str):
        content = plain["content"]
        raise refused(f"{name}.content", content, "it must be text, a list of parts or None")
    for own, other in (_REASONING, _REASONING[::-1]):
        if plain.get(own) is not None:
            plain.setdefault(other, plain[own])
    if plain.get("tool_calls") is not None:
        if not isinstance(plain["tool_calls"], list | tuple):
            raise refused(f"{name}.tool_calls", plain["tool_calls"], "it must be a list")
        plain["tool_calls"] = [
            _parsed_tool_call(call, f"{name}.tool_calls[{place}]")
            for place, call in enumerate(plain["tool_calls"])
        ]
    return plain


def _plain_content(content: list[Any], name: str) -> str | list[dict[str, str]]:
    """The text of a list of parts; if there are images or videos, which `take_images` has marked,
    the list: templates put something in their places."""
    marks = (IMAGE, VIDEO)
    if not any(part in marks for part in content):
        return text_of_content(content, name)
    return [
        part if part in marks else {"type": "text", "text": _text_of_part(part, f"{name}[{place}]")}
        for place, part in enumerate(content)
    ]


def text_of_content(content: object, name: str = "content") -> str:
    """The text of a message's content: a text, or a list of parts. Errors call it `name`."""
    if isinstance(content, list):
        parts = (_text_of_part(part, f"{name}[{place}]") for place, part in enumerate(content))
        return "\n".join(parts)
    return content if isinstance(content, str) else ""


def _text_of_part(part: object, name: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text":
        if not isinstance(part.get("text"), str):
            raise refused(f"{name}.text", part.get("text"), "it must be a string")
        return part["text"]
    kinds = "'text', 'image_url', 'input_image', 'image_pil' or 'video_url'"
    raise refused(name, part, f"it is no text, image or video; parts may be of type {kinds}")


def _parsed_tool_call(call: object, name: str) -> dict[str, Any]:
    """Parse the arguments of a tool call, a JSON string: templates expect the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping | None):
        raise refused(name, call, "a tool call must be a dict, and so its 'function'")
    function = dict(function or {})
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            given = function["arguments"]
            raise refused(f"{name}.function.arguments", given, f"not JSON: {error}") from error
    return {**call, "function": function}
