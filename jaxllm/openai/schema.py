"""The protocol as JSON schemas, made of its types.

What the types cannot say is added here: fields that are known but ask for nothing, and bounds that
are checked where a request is read.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxllm.openai.completions import MAX_PROMPTS
from jaxllm.openai.fields import ANY, REQUEST_ID_IN_WORDS, RequestFields, neutral_values
from jaxllm.openai.tools import MAX_TOOLS
from jaxllm.sampling_params import Limits

Schema = dict[str, Any]

_TEMPLATE = "#/components/schemas/{name}"


def request_schemas(kinds: Sequence[type]) -> dict[str, Schema]:
    """The schemas of bodies of requests, and of what they are made of, by name."""
    schemas = _schemas(kinds)
    for schema in schemas.values():
        for name, field in schema["properties"].items():
            field |= _BOUNDS.get(name, {})
    for kind in kinds:
        properties = schemas[kind.__name__]["properties"]
        properties |= _SHAPES.get(kind.__name__, {})
        if issubclass(kind, RequestFields):
            for name, values in neutral_values(kind).items():
                properties.setdefault(name, _neutral_schema(values))
    return schemas


def answer_schemas(kinds: Sequence[type]) -> dict[str, Schema]:
    """The schemas of bodies of answers, and of what they are made of, by name."""
    schemas = _schemas(kinds)
    for schema in schemas.values():
        for name, field in schema["properties"].items():
            # A field that has a default is sent nevertheless; one that may be unset has none.
            if "default" in field:
                del field["default"]
                schema["required"].append(name)
    return schemas


def ref(kind: type) -> Schema:
    """What stands for the schema of a type."""
    return {"$ref": _TEMPLATE.format(name=kind.__name__)}


def _schemas(kinds: Sequence[type]) -> dict[str, Schema]:
    return msgspec.json.schema_components(kinds, ref_template=_TEMPLATE)[1]


def _neutral_schema(values: tuple[Any, ...]) -> Schema:
    if values == (ANY,):
        return {"description": "Without effect."}
    return {"enum": [*values, None], "description": "Not supported; these values ask for nothing."}


_INT32 = 2**31 - 1
_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": _INT32}
_TOKEN_IDS = {"type": "array", "items": _TOKEN_ID, "minItems": 1}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string"},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"anyOf": [{"type": "string"}, _TEXT_PART]}},
                {"type": "null"},
            ]
        },
        "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
    },
    "required": ["role"],
}
_OF_CONVERSATIONS = {
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "tool_choice": {"enum": ["none", "auto", None]},
}
# Fields of any type, for which the types have no more to say.
_SHAPES: dict[str, dict[str, Schema]] = {
    "ChatRequest": _OF_CONVERSATIONS,
    "TokenizeChat": _OF_CONVERSATIONS,
    "CompletionRequest": {
        "prompt": {
            "anyOf": [
                {"type": "string"},
                _TOKEN_IDS,
                {
                    "type": "array",
                    "items": {"anyOf": [{"type": "string"}, _TOKEN_IDS]},
                    "minItems": 1,
                    "maxItems": MAX_PROMPTS,
                },
            ],
            "description": "A text, token ids, or several of these.",
        },
    },
}
# Of fields of this name. A keyword says nothing of values of other types, such as null.
_BOUNDS: dict[str, Schema] = {
    "n": {"minimum": 1, "maximum": Limits.MAX_N},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": _INT32},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "seed": {"minimum": -(2**63), "maximum": 2**64 - 1},
    "stop": {
        "maxItems": Limits.MAX_STOP_STRINGS,
        "items": {"minLength": 1, "maxLength": Limits.MAX_STOP_STRING_CHARS},
        "minLength": 1,
        "maxLength": Limits.MAX_STOP_STRING_CHARS,
    },
    "max_tokens": {"minimum": 0, "maximum": _INT32},
    "max_completion_tokens": {"minimum": 1, "maximum": _INT32},
    "min_tokens": {"minimum": 0, "maximum": _INT32},
    "logprobs": {"minimum": -1},
    "top_logprobs": {"minimum": -1},
    "prompt_logprobs": {"minimum": -1},
    "stop_token_ids": {"maxItems": Limits.MAX_STOP_TOKEN_IDS, "items": _TOKEN_ID},
    "bad_words": {"maxItems": Limits.MAX_BAD_WORDS, "items": {"minLength": 1}},
    "allowed_token_ids": {"minItems": 1, "items": _TOKEN_ID},
    "logit_bias": {"maxProperties": Limits.MAX_LOGIT_BIAS},
    "truncate_prompt_tokens": {"minimum": -1},
    "priority": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "cache_salt": {"minLength": 1, "maxLength": Limits.MAX_SALT_CHARS},
    "request_id": {"minLength": 1, "maxLength": 128, "description": REQUEST_ID_IN_WORDS},
    "tools": {"minItems": 1, "maxItems": MAX_TOOLS},
    "name": {"minLength": 1, "maxLength": 64},  # of a function
    "tokens": {"items": _TOKEN_ID},
}
