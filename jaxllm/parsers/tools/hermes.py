"""The format of Hermes 2 Pro, Qwen 2.5, Qwen 3, Granite 4, ERNIE 4.5 and others.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from jaxllm.parsers.tools.announced_json import CALL, END_CALL, announced_json
from jaxllm.parsers.tools.base import CallForm

HERMES = announced_json(
    "<tool_call>",
    close="</tool_call>",
    forms=(CallForm("<tool_call>", CALL, END_CALL, opening="\n", closing="\n</tool_call>"),),
)
