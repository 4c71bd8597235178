"""Checks that the calls of a conversation and their results belong together.

Templates need no ids, so calls and results without one are as they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.errors import refused


def check_calls(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse calls without a name or a result, and results of no call. What is malformed otherwise
    is refused where the prompt is made."""
    waiting: dict[str, str] = {}  # calls without a result: id -> their place
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            continue
        if message.get("role") == "tool":
            _check_result(message, f"messages[{place}].tool_call_id", waiting)
            continue
        _check_none(waiting)
        calls = message.get("tool_calls")
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, Mapping):
                _check_call(call, f"messages[{place}].tool_calls[{number}]", waiting)
    _check_none(waiting)


def _check_call(call: Mapping[str, Any], where: str, waiting: dict[str, str]) -> None:
    function, name = call.get("function"), call.get("id")
    if isinstance(function, Mapping | None):
        named = (function or {}).get("name")
        if not isinstance(named, str) or not named:
            raise refused(f"{where}.function.name", named, "it must be the name of a function")
    if name is None:
        return
    if not isinstance(name, str):
        raise refused(f"{where}.id", name, "it must be a string")
    if name in waiting:
        raise refused(f"{where}.id", name, "another call of this message has it, too")
    waiting[name] = where


def _check_result(message: Mapping[str, Any], where: str, waiting: dict[str, str]) -> None:
    name = message.get("tool_call_id")
    if name is None:
        waiting.clear()  # it may be of any call
    elif not isinstance(name, str):
        raise refused(where, name, "it must be a string")
    elif waiting.pop(name, None) is None:
        why = "no call before it has this id, or its result was given"
        raise refused(where, name, why)


def _check_none(waiting: Mapping[str, str]) -> None:
    for name, where in waiting.items():
        raise refused(f"{where}.id", name, "this call has no message of role 'tool' behind it")
