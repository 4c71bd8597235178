"""The format of InternLM 2.5 and 3: one object, whose arguments are called parameters.

<|action_start|><|plugin|>
{"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>
"""

from jaxllm.parsers.tools.announced_json import END_CALL, announced_json
from jaxllm.parsers.tools.base import CallForm

_OPEN, _CLOSE = "<|action_start|><|plugin|>", "<|action_end|>"

INTERNLM = announced_json(
    _OPEN,
    close=_CLOSE,
    forms=(
        CallForm(_OPEN, '{"name": "NAME", "parameters": ', END_CALL, opening="\n", closing=_CLOSE),
    ),
)
