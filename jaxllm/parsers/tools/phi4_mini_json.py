"""The formats of Phi 4 Mini: an array of calls, after a word or between its special tokens.

functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]
<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>
"""

from jaxllm.parsers.tools.announced_json import announced_json

PHI4_MINI_JSON = announced_json("functools", "<|tool_call|>", close="<|/tool_call|>")
