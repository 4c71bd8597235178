"""The format of InternLM 2.5 and 3: one object, whose arguments are called parameters.

<|action_start|><|plugin|>
{"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>
"""

from jaxllm.parsers.tools.announced_json import announced_json

INTERNLM = announced_json("<|action_start|><|plugin|>", close="<|action_end|>")
