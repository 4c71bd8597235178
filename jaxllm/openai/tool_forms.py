"""Calls of tools as structural tags: the forms of answers that must call, or call strictly."""

import json
import re
from collections.abc import Sequence
from typing import Any

from jaxllm.errors import refused
from jaxllm.openai.tools import Tool
from jaxllm.parsers.tools.base import CallForm, ToolFormat
from jaxllm.sampling_params import StructuredOutputsParams
from jaxllm.structured_output.params import MAX_FORM_CHARS

_Format = dict[str, Any]

# A function without parameters takes none, as OpenAI has it.
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS = {"type": "object"}


def form_of_required(tools: Sequence[Tool], *, parallel: bool) -> StructuredOutputsParams:
    """A JSON array of calls; see `parsers.tools.chosen`."""
    calls = {
        "type": "tags_with_separator",
        "tags": _tags(tools, '{"name": "NAME", "parameters": ', "}"),
        "separator": ", ",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    parts = [{"type": "const_string", "value": "["}, calls, {"type": "const_string", "value": "]"}]
    return _whole({"type": "sequence", "elements": parts})


def form_of_named(tools: Sequence[Tool], name: str) -> StructuredOutputsParams:
    """The arguments of the named function."""
    tool = next(tool for tool in tools if tool.function.name == name)
    return _whole(_arguments(tool))


def form_of_strict(
    tools: Sequence[Tool], calls: ToolFormat, *, parallel: bool
) -> StructuredOutputsParams:
    """Free text, in which the calls follow the schemas of their functions."""
    if any(not form.trigger for form in calls.forms):
        return _whole(_calls_or_text(tools, calls.forms, parallel))
    # Forms of one call first, so that a tag's index says which tool it is of.
    forms = sorted(calls.forms, key=lambda form: form.separator is not None)
    tags: list[_Format] = []
    for form in forms:
        begin = form.trigger + form.opening
        if form.separator is None:
            end = form.end + form.closing
            tags += _tags(tools, begin + form.begin, end, only_strict=True)
        else:
            tags.append(_tag(begin, _several(tools, form, parallel), form.closing))
    return _whole(
        {
            "type": "triggered_tags",
            "triggers": list(dict.fromkeys(form.trigger for form in forms)),
            "tags": tags,
            "stop_after_first": not parallel,
        }
    )


def field_of_part(part: str, tools: Sequence[Tool], name: str | None) -> str | None:
    """The field of the request that a part of one of these forms comes from, if it is a schema."""
    if not part.startswith("structured_outputs.structural_tag") or "json_schema" not in part:
        return None
    if name is not None:
        place = next(place for place, tool in enumerate(tools) if tool.function.name == name)
    else:
        place = int(re.findall(r"tags\[(\d+)\]\.content\.json_schema", part)[-1]) % len(tools)
    return f"tools[{place}].function.parameters"


def _calls_or_text(tools: Sequence[Tool], forms: Sequence[CallForm], parallel: bool) -> _Format:
    """Calls from the beginning of the answer, or text that does not begin as they do."""
    elements = [
        _tag(form.trigger + form.opening, _several(tools, form, parallel), form.closing)
        for form in forms
    ]
    text = {"type": "regex", "pattern": r"(\s*[^\s{](?s:.)*)?"}
    return {"type": "or", "elements": [*elements, text]}


def _several(tools: Sequence[Tool], form: CallForm, parallel: bool) -> _Format:
    return {
        "type": "tags_with_separator",
        "tags": _tags(tools, form.begin, form.end, only_strict=True),
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _tags(
    tools: Sequence[Tool], begin: str, end: str, *, only_strict: bool = False
) -> list[_Format]:
    """A tag for each tool. NAME in `begin` stands for its name."""
    return [
        _tag(
            begin.replace("NAME", tool.function.name),
            _arguments(tool, only_strict=only_strict),
            end,
        )
        for tool in tools
    ]


def _arguments(tool: Tool, *, only_strict: bool = False) -> _Format:
    schema = tool.function.parameters or _NO_ARGUMENTS
    if only_strict and not tool.function.strict:
        schema = _ANY_ARGUMENTS
    return {"type": "json_schema", "json_schema": schema}


def _tag(begin: str, content: _Format, end: str) -> _Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _whole(form: _Format) -> StructuredOutputsParams:
    tag = json.dumps({"type": "structural_tag", "format": form})
    if len(tag) > MAX_FORM_CHARS:
        raise refused("tools", f"{len(tag)} characters", f"at most {MAX_FORM_CHARS} in a form")
    return StructuredOutputsParams(structural_tag=tag)
