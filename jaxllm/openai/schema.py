"""The protocol as JSON schemas, made from its types.

This module adds what the types cannot express: fields that are known but have no effect, and bounds
that are checked when a request is read. Some bounds depend on the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxllm.openai.completions import MAX_PROMPTS
from jaxllm.openai.fields import ANY, REQUEST_ID_IN_WORDS, RequestFields, neutral_values
from jaxllm.openai.tools import MAX_TOOLS
from jaxllm.sampling_params import Limits

Schema = dict[str, Any]

_TEMPLATE = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBounds:
    """The bounds that an engine and its server set on requests."""

    vocab_size: int = 2**31 - 1
    max_logprobs: int = 2**31 - 1
    max_model_len: int = 2**31 - 1
    max_n: int = Limits.MAX_N
    takes_empty_text: bool = True  # the tokenizer adds a token at the beginning of every text
    has_priorities: bool = True
    takes_embeds: bool = True


ANY_ENGINE = EngineBounds()


def request_schemas(kinds: Sequence[type], engine: EngineBounds = ANY_ENGINE) -> dict[str, Schema]:
    """The schemas of request bodies and of their parts, by name."""
    schemas = _schemas(kinds)
    bounds = _bounds(engine)
    for schema in schemas.values():
        for name, field in schema["properties"].items():
            field |= bounds.get(name, {})
    for kind in kinds:
        properties = schemas[kind.__name__]["properties"]
        properties |= _shapes(engine).get(kind.__name__, {})
        if kind.__name__ in _REFUSE_NO_TOOLS:
            properties["tools"] |= {"minItems": 1}
        if issubclass(kind, RequestFields):
            for name, values in neutral_values(kind).items():
                properties.setdefault(name, _neutral_schema(values))
    return schemas


def answer_schemas(kinds: Sequence[type]) -> dict[str, Schema]:
    """The schemas of answer bodies and of their parts, by name."""
    schemas = _schemas(kinds)
    for schema in schemas.values():
        for name, field in schema["properties"].items():
            # A field with a default is always sent. A field that may be unset has no default.
            if "default" in field:
                del field["default"]
                schema["required"].append(name)
    return schemas


def ref(kind: type) -> Schema:
    """A reference to the schema of a type."""
    return {"$ref": _TEMPLATE.format(name=kind.__name__)}


def _schemas(kinds: Sequence[type]) -> dict[str, Schema]:
    return msgspec.json.schema_components(kinds, ref_template=_TEMPLATE)[1]


def _neutral_schema(values: tuple[Any, ...]) -> Schema:
    if values == (ANY,):
        return {"description": "Without effect."}
    return {"enum": [*values, None], "description": "Not supported; these values ask for nothing."}


# In other protocols an empty list of tools is none.
_REFUSE_NO_TOOLS = ("ChatRequest", "TokenizeChat")
_INT32 = 2**31 - 1
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
    "tool_choice": {
        "anyOf": [
            {"enum": ["none", "auto", "required", None]},
            {
                "type": "object",
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "properties": {"name": {"type": "string"}},
                        "required": ["name"],
                        "additionalProperties": False,
                    },
                },
                "required": ["type", "function"],
                "additionalProperties": False,
            },
        ]
    },
}


def _token_id(engine: EngineBounds) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": engine.vocab_size - 1}


def _shapes(engine: EngineBounds) -> dict[str, dict[str, Schema]]:
    """Schemas of fields whose type is `Any`, by request type."""
    text = {"type": "string", "minLength": 0 if engine.takes_empty_text else 1}
    token_ids = {"type": "array", "items": _token_id(engine), "minItems": 1}
    several = {
        "type": "array",
        "items": {"anyOf": [text, token_ids]},
        "minItems": 1,
        "maxItems": min(MAX_PROMPTS, engine.max_n),
    }
    prompt = {
        "anyOf": [text, token_ids, several, {"type": "null"}],
        "description": "A text, token ids, or several of these.",
    }
    return {
        "ChatRequest": _OF_CONVERSATIONS,
        "TokenizeChat": _OF_CONVERSATIONS,
        "CompletionRequest": {"prompt": prompt}
        | ({} if engine.takes_embeds else {"prompt_embeds": _neutral_schema(())}),
    }


def _bounds(engine: EngineBounds) -> dict[str, Schema]:
    """Bounds of fields, by name. A keyword does not apply to other types, such as null."""
    # A value of -1 means the whole vocabulary.
    least = -1 if engine.max_logprobs >= engine.vocab_size else 0
    logprobs = {"minimum": least, "maximum": engine.max_logprobs}
    token_ids = {"items": _token_id(engine)}
    return {
        "n": {"minimum": 1, "maximum": min(Limits.MAX_N, engine.max_n)},
        "best_of": {"minimum": 1, "maximum": min(Limits.MAX_N, engine.max_n)},
        "length_penalty": {"minimum": -32, "maximum": 32},
        "temperature": {"minimum": 0, "maximum": Limits.MAX_TEMPERATURE},
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
        "logprobs": logprobs,
        "top_logprobs": logprobs,
        "prompt_logprobs": logprobs,
        "stop_token_ids": {"maxItems": Limits.MAX_STOP_TOKEN_IDS, **token_ids},
        "bad_words": {"maxItems": Limits.MAX_BAD_WORDS, "items": {"minLength": 1}},
        "allowed_token_ids": {"minItems": 1, **token_ids},
        "logit_bias": {"maxProperties": Limits.MAX_LOGIT_BIAS},
        "truncate_prompt_tokens": {
            "minimum": -1,
            "not": {"const": 0},
            "maximum": engine.max_model_len,
        },
        "priority": (
            {"minimum": -(2**63), "maximum": 2**63 - 1}
            if engine.has_priorities
            else {"enum": [0, None]}
        ),
        "cache_salt": {"minLength": 1, "maxLength": Limits.MAX_SALT_CHARS},
        "request_id": {"minLength": 1, "maxLength": 128, "description": REQUEST_ID_IN_WORDS},
        "tools": {"maxItems": MAX_TOOLS},
        "name": {"minLength": 1, "maxLength": 64},  # of a function
        "tokens": token_ids,
    }
