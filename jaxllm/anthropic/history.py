"""Turns Anthropic's system prompt and messages into the messages of a chat request.

A message there is a list of blocks. Its results of tools become messages of their own, as chat
templates expect them, and the rest stays one message.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from jaxllm.errors import ValidationError, refused

_Message = dict[str, Any]
# Fields of any block that change nothing here: prefixes are cached without being told.
_HINTS = {"cache_control", "citations"}


class History(NamedTuple):
    """The messages for a chat template."""

    messages: list[_Message]
    # Whether the last one is the beginning of the answer.
    is_begun: bool


def read_history(system: str | list[Any] | None, messages: Sequence[Any]) -> History:
    """Convert a conversation; refuse what a chat template cannot say, and calls whose results are
    missing."""
    found: list[_Message] = []
    if system:
        found.append({"role": "system", "content": _texts(system, "system")})
    if not messages:
        raise ValidationError("messages is empty; give at least one", parameter="messages")
    last, waiting = "", dict[str, str]()  # calls without a result: id -> their place
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        role, blocks = _read_message(message, where)
        if role == "assistant":
            _check_results(waiting)
            new, waiting = [_of_assistant(blocks, where)], _calls(blocks, where)
        elif role == "user":
            new, waiting = _of_user(blocks, where, waiting), {}
        else:
            new = [{"role": "system", "content": _texts(blocks, f"{where}.content")}]
        if new and role == last:
            # Turns of one role in a row are one turn.
            _join(found, new)
        else:
            found += new
        last = role
    _check_results(waiting)
    return History(found, last == "assistant")


def _read_message(message: object, where: str) -> tuple[str, list[Any]]:
    match message:
        case {"role": "user" | "assistant" | "system" as role, "content": content, **others}:
            if others:
                raise refused(f"{where}.{min(others)}", others[min(others)], "no such field")
        case _:
            raise refused(where, message, "it must be an object with 'role' and 'content'")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise refused(f"{where}.content", content, "it must be text or a list of blocks")
    return str(role), content


def _of_assistant(blocks: Sequence[object], where: str) -> _Message:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[_Message] = []
    for place, block in enumerate(blocks):
        at = f"{where}.content[{place}]"
        kind = _kind(block, at)
        if kind == "text":
            texts.append(_field(block, "text", str, at))
        elif kind == "thinking":
            reasoning.append(_field(block, "thinking", str, at))
        elif kind == "tool_use":
            given = _field(block, "input", dict, at)
            function = {"name": _field(block, "name", str, at), "arguments": _json(given)}
            call = {"id": _field(block, "id", str, at), "type": "function", "function": function}
            calls.append(call)
        else:
            raise _unsupported(kind, at)
    message: _Message = {"role": "assistant", "content": "".join(texts)}
    if reasoning:
        message |= {"reasoning": "".join(reasoning)}
    if calls:
        message |= {"tool_calls": calls}
    return message


def _calls(blocks: Sequence[Any], where: str) -> dict[str, str]:
    return {
        block["id"]: f"{where}.content[{place}]"
        for place, block in enumerate(blocks)
        if block["type"] == "tool_use"
    }


def _of_user(blocks: Sequence[object], where: str, waiting: Mapping[str, str]) -> list[_Message]:
    results: list[_Message] = []
    parts: list[dict[str, Any]] = []
    answered = set[str]()
    for place, block in enumerate(blocks):
        at = f"{where}.content[{place}]"
        kind = _kind(block, at)
        if kind == "tool_result":
            if parts:
                raise refused(at, kind, "results of tools come before text")
            call = _field(block, "tool_use_id", str, at)
            if call not in waiting:
                why = "the message before has no tool_use block with this id"
                raise refused(f"{at}.tool_use_id", call, why)
            if call in answered:
                raise refused(f"{at}.tool_use_id", call, "this call has a result already")
            answered.add(call)
            content = _result(block, at)
            results.append({"role": "tool", "tool_call_id": call, "content": content})
        elif kind == "text":
            parts.append(_part(_field(block, "text", str, at)))
        elif kind == "document":
            parts.append(_part(_document(block, at)))
        elif kind == "image":
            parts.append(_image_part(block, at))
        else:
            raise _unsupported(kind, at)
    _check_results({call: at for call, at in waiting.items() if call not in answered})
    if not parts and results:
        return results
    if any(part["type"] != "text" for part in parts):
        return [*results, {"role": "user", "content": parts}]
    return [*results, {"role": "user", "content": "\n".join(part["text"] for part in parts)}]


def _check_results(waiting: Mapping[str, str]) -> None:
    for call, at in waiting.items():
        raise refused(f"{at}.id", call, "the next message must have the result of this tool_use")


def _result(block: object, at: str) -> str | list[dict[str, Any]]:
    """The text of a result, or its parts if there are images among them."""
    assert isinstance(block, Mapping)
    content, is_error = block.get("content"), block.get("is_error", False)
    if not isinstance(is_error, bool):
        raise refused(f"{at}.is_error", is_error, "it must be true or false")
    # Templates have no place for the mark of an error, so the text says it.
    mark, at = "Error: " if is_error else "", f"{at}.content"
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return mark + ("" if content is None else _texts(content, at))
    parts = [_part(mark)] if is_error else []
    for place, inner in enumerate(content):
        where = f"{at}[{place}]"
        kind = _kind(inner, where)
        if _is_image(inner):
            parts.append(_image_part(inner, where))
        elif kind == "text":
            parts.append(_part(_field(inner, "text", str, where)))
        else:
            raise _unsupported(kind, where)
    return parts


def _document(block: object, at: str) -> str:
    source = _field(block, "source", dict, at)
    if source.get("type") != "text":
        raise refused(f"{at}.source.type", source.get("type"), "documents must be of type 'text'")
    title = block.get("title") if isinstance(block, Mapping) else None
    text = _field(source, "data", str, f"{at}.source")
    return text if not isinstance(title, str) else f"{title}\n{text}"


def _image(block: object, at: str) -> str:
    """The URL of an image."""
    source, at = _field(block, "source", dict, at), f"{at}.source"
    match source.get("type"):
        case "url":
            return _field(source, "url", str, at)
        case "base64":
            kind, data = (_field(source, name, str, at) for name in ("media_type", "data"))
            return f"data:{kind};base64,{data}"
        case other:
            raise refused(f"{at}.type", other, "images must be of type 'base64' or 'url'")


def _is_image(block: object) -> bool:
    return isinstance(block, Mapping) and block.get("type") == "image"


def _image_part(block: object, at: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": _image(block, at)}}


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _texts(content: object, where: str) -> str:
    """A text, or one of blocks that are all text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(where, content, "it must be text or a list of blocks")
    texts = []
    for place, block in enumerate(content):
        at = f"{where}[{place}]"
        kind = _kind(block, at)
        if kind != "text":
            raise _unsupported(kind, at)
        texts.append(_field(block, "text", str, at))
    return "\n".join(texts)


# The fields of the blocks that are read.
_FIELDS = {
    "text": {"text"},
    "thinking": {"thinking", "signature"},
    "tool_use": {"id", "name", "input", "caller"},
    "tool_result": {"tool_use_id", "content", "is_error"},
    "document": {"source", "title"},
    "image": {"source"},
}


def _kind(block: object, at: str) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(block, Mapping) or not isinstance(kind, str):
        raise refused(at, block, "it must be a block, an object with 'type'")
    if kind in _FIELDS:
        for name, value in block.items():
            if name not in _FIELDS[kind] | _HINTS | {"type"} and value is not None:
                raise refused(f"{at}.{name}", value, f"a {kind} block has no such field here")
    return kind


def _field(block: object, name: str, kind: type, at: str) -> Any:
    value = block.get(name) if isinstance(block, Mapping) else None
    if not isinstance(value, kind):
        words = {str: "a string", dict: "an object"}
        raise refused(f"{at}.{name}", value, f"it must be {words[kind]}")
    return value


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _unsupported(kind: str, at: str) -> ValidationError:
    return refused(at, kind, f"blocks of this type are not supported here; use {_SUPPORTED}")


_SUPPORTED = "'text', in answers 'thinking' and 'tool_use', in questions 'tool_result' and 'image'"


def _join(found: list[_Message], new: list[_Message]) -> None:
    """Add messages to those of the same role before them."""
    first, before = new[0], found[-1]
    if first["role"] != before["role"] or first["role"] == "tool":
        found += new
        return
    between = "" if first["role"] == "assistant" else "\n"
    if isinstance(before["content"], list) or isinstance(first["content"], list):
        before["content"] = _as_parts(before["content"]) + _as_parts(first["content"])
    else:
        before["content"] = between.join(filter(None, (before["content"], first["content"])))
    for name in ("reasoning", "tool_calls"):
        if name in first:
            before[name] = before[name] + first[name] if name in before else first[name]
    found += new[1:]


def _as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [_part(content)]
