"""The format of Hunyuan and Jamba: one array of all calls.

<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_calls>
"""

from jaxllm.parsers.tools.announced_json import announced_json, array_form

HUNYUAN_A13B = announced_json(
    "<tool_calls>", close="</tool_calls>", forms=(array_form("<tool_calls>", "</tool_calls>"),)
)
