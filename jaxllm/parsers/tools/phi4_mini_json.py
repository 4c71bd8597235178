"""The formats of Phi 4 Mini: an array of calls, after a word or between its special tokens.

functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]
<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>
"""

from jaxllm.parsers.tools.announced_json import announced_json, array_form

PHI4_MINI_JSON = announced_json(
    "functools",
    "<|tool_call|>",
    close="<|/tool_call|>",
    # The word alone may be in a text on Python.
    forms=(
        array_form("functools[")._replace(opening=""),
        array_form("<|tool_call|>", "<|/tool_call|>"),
    ),
)
