"""The format of Command R7B and Command A: one array of all calls, with keys of its own.

    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}
    ]<|END_ACTION|>

The calls get ids like those of other models: the model's numbers may begin anew in the next answer,
and a conversation must not have an id twice. The chat template makes numbers of the ids again.
"""

from jaxllm.parsers.tools.announced_json import announced_json

COHERE_COMMAND3 = announced_json("<|START_ACTION|>", close="<|END_ACTION|>", name_key="tool_name")
