"""The format of LongCat: that of Hermes, with a tag of its own.

<longcat_tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</longcat_tool_call>
"""

from jaxllm.parsers.tools.announced_json import announced_json

LONGCAT = announced_json("<longcat_tool_call>", close="</longcat_tool_call>")
