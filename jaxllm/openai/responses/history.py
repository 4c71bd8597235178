"""Turns the items of a request into the messages of a chat request.

What a model wrote in one turn is several items: reasoning, messages, calls. They become one
message.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.errors import refused
from jaxllm.media.chat import has_images
from jaxllm.openai.responses.tools import joined

_Message = dict[str, Any]
# The fields of items that are read, and those that say nothing to a model.
_FIELDS = {
    "message": {"role", "content"},
    "function_call": {"call_id", "name", "namespace", "arguments"},
    "function_call_output": {"call_id", "output"},
    "reasoning": {"content", "summary", "encrypted_content"},
}
_HINTS = {"type", "id", "status", "phase"}
_ROLES = ("user", "assistant", "system", "developer")


def read_items(items: Sequence[Any], *, num_before: int = 0) -> list[_Message]:
    """Convert items to messages; refuse those that a chat template cannot say, and calls whose
    outputs are missing.

    Args:
      num_before: how many items are of earlier responses, and not of this request's input.
    """
    found: list[_Message] = []
    waiting: dict[str, str] = {}  # calls without an output: id -> their place
    for place, item in enumerate(items, -num_before):
        where = f"input[{place}]"
        match _kind(item, where):
            case "message":
                message = _message(item, where)
                if message["role"] != "assistant":
                    _check_outputs(waiting)
            case "reasoning":
                message = {"role": "assistant", "content": "", "reasoning": _reasoning(item, where)}
            case "function_call":
                message = {"role": "assistant", "content": "", "tool_calls": [_call(item, where)]}
                waiting[item["call_id"]] = where
            case _:
                message = _output(item, where)
                call = message["tool_call_id"]
                if waiting.pop(call, None) is None:
                    why = "no function_call before it has this id, or its output was given"
                    raise refused(f"{where}.call_id", call, why)
        _add(found, message)
    _check_outputs(waiting)
    return found


def with_instructions(instructions: str | None, messages: list[_Message]) -> list[_Message]:
    """The messages behind the instructions. Templates want one message of the system, in front."""
    texts = [instructions] if instructions else []
    rest = list(messages)
    while rest and rest[0]["role"] == "system":
        texts.append(rest.pop(0)["content"])
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest] if texts else rest


def _kind(item: object, where: str) -> str:
    if not isinstance(item, Mapping):
        raise refused(where, item, "it must be an object")
    kind = item.get("type", "message" if "role" in item else None)
    if kind not in _FIELDS:
        raise refused(
            f"{where}.type", kind, f"it is not supported here; supported are {', '.join(_FIELDS)}"
        )
    for field, value in item.items():
        if field not in _FIELDS[kind] | _HINTS and value is not None:
            raise refused(f"{where}.{field}", value, f"a {kind} item has no such field here")
    return kind


def _message(item: Mapping[str, Any], where: str) -> _Message:
    role = item.get("role")
    if role not in _ROLES:
        raise refused(f"{where}.role", role, f"it must be one of {', '.join(_ROLES)}")
    content: Any = item.get("content")
    if role == "user" and has_images([item]):
        content = _parts(content, f"{where}.content")
    else:
        content = _texts(content, f"{where}.content")
    # A developer is what a system was before; templates know the older word.
    return {"role": "system" if role == "developer" else role, "content": content}


def _parts(content: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """Parts of a chat's message, among which are images."""
    parts: list[dict[str, Any]] = []
    for place, part in enumerate(content):
        if has_images([{"content": [part]}]):
            _check_text(part.get("image_url"), f"{where}[{place}].image_url")
            parts.append({name: value for name, value in part.items() if value is not None})
        else:
            parts.append({"type": "text", "text": _text(part, f"{where}[{place}]")})
    return parts


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    if item.get("encrypted_content") is not None:
        raise refused(
            f"{where}.encrypted_content", item["encrypted_content"], "nothing here can read it"
        )
    content = item.get("content")
    return "" if content is None else _texts(content, f"{where}.content")


def _call(item: Mapping[str, Any], where: str) -> _Message:
    for field in ("call_id", "name", "arguments"):
        _check_text(item.get(field), f"{where}.{field}")
    try:
        arguments = json.loads(item["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        given = item["arguments"]
        raise refused(f"{where}.arguments", given, f"not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise refused(f"{where}.arguments", item["arguments"], "it must be the JSON of an object")
    name = item["name"]
    if (namespace := item.get("namespace")) is not None:
        _check_text(namespace, f"{where}.namespace")
        if not namespace:
            raise refused(f"{where}.namespace", namespace, "a namespace has a name")
        name = joined(namespace, name)
    function = {"name": name, "arguments": item["arguments"] or "{}"}
    return {"id": item["call_id"], "type": "function", "function": function}


def _output(item: Mapping[str, Any], where: str) -> _Message:
    _check_text(item.get("call_id"), f"{where}.call_id")
    output: Any = item.get("output")
    sees = has_images([{"content": output}])
    content = (_parts if sees else _texts)(output, f"{where}.output")
    return {"role": "tool", "tool_call_id": item["call_id"], "content": content}


def _texts(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(where, content, "it must be text or a list of parts")
    return "\n".join(_text(part, f"{where}[{place}]") for place, part in enumerate(content))


def _text(part: object, at: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in _PARTS:
        raise refused(at, kind, f"it is no text; supported are {', '.join(_PARTS)}")
    _check_text(part.get(_PARTS[kind]), f"{at}.{_PARTS[kind]}")
    return part[_PARTS[kind]]


# Parts of text, and the field that has it.
_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}


def _check_text(value: object, where: str) -> None:
    if not isinstance(value, str):
        raise refused(where, value, "it must be a string")


def _check_outputs(waiting: Mapping[str, str]) -> None:
    for call, where in waiting.items():
        raise refused(f"{where}.call_id", call, "this call has no function_call_output behind it")


def _add(found: list[_Message], message: _Message) -> None:
    """Add a message, or what a model wrote to the turn that it began."""
    before = found[-1] if found else None
    if before is None or not before["role"] == message["role"] == "assistant":
        found.append(message)
        return
    before["content"] = "\n".join(filter(None, (before["content"], message["content"])))
    for name in ("reasoning", "tool_calls"):
        if name in message:
            before[name] = before[name] + message[name] if name in before else message[name]
