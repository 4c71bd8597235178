"""Requests with a grammar, as they arrive at an engine core, and what becomes of them."""

import json
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.executor.launch import make_executors
from jaxllm.messages import EngineOutput, EngineRequest, PositionLogprobs
from jaxllm.sampling_params import SamplingParams

# All that schemas are made of, each in few tokens, so that random ones end.
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "size": {"type": "integer", "minimum": -5, "maximum": 40},
            "is": {"type": "boolean"},
        },
        "required": ["name", "size"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", 7, None]}, "minItems": 1, "maxItems": 4},
    {
        "anyOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "a"}, "x": {"type": "number", "multipleOf": 0.5}},
                "required": ["kind", "x"],
                "additionalProperties": False,
            },
            {"type": "string", "pattern": "^[a-f]{2,5}-[0-9]{1,3}$"},
        ]
    },
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"left": {"$ref": "#/$defs/tree"}, "v": {"enum": [1, 22]}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
]


def json_grammar(schema: dict[str, Any] | bool) -> str:
    """A grammar without optional whitespace, of which random answers would be full."""
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"whitespace_flexible": False}
    )


GRAMMARS = [json_grammar(schema) for schema in SCHEMAS]


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    jsonschema.validate(json.loads(text), schema)
    return True


def request(
    request_id: str,
    prompt: list[int],
    grammar: str | None = None,
    *,
    eos: tuple[int, ...] = (0,),
    **params: Any,
) -> EngineRequest:
    """A request as the frontend makes it; seeded, so that it has one answer."""
    its = SamplingParams(**({"temperature": 1.0, "max_tokens": 40} | params))
    assert its.max_tokens is not None
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=its,
        max_tokens=its.max_tokens,
        seed=1000 + hash_of(request_id) if its.seed is None else its.seed,
        eos_token_ids=[] if its.ignore_eos else list(eos),
        grammar=grammar,
    )


def hash_of(text: str) -> int:
    return int.from_bytes(text.encode()[-6:], "little")


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish: str = ""
    stop_reason: int | str | None = None
    error: str | None = None

    def add(self, output: EngineOutput) -> None:
        assert not self.finish, "it had ended"
        self.tokens += output.new_token_ids
        self.logprobs += output.new_logprobs or []
        self.error = output.error
        if output.finish_reason is not None:
            self.finish, self.stop_reason = str(output.finish_reason), output.stop_reason


def make_core(model: str, **options: Any) -> EngineCore:
    config = EngineConfig.create(model=model, **options)
    [executor] = make_executors(config)
    return EngineCore(config, executor)


def serve(core: EngineCore, requests: list[EngineRequest]) -> dict[str, Answer]:
    """Run these requests to their ends."""
    answers = {one.request_id: Answer() for one in requests}
    for one in requests:
        core.add_request(one)
    while core.has_work():
        for output in core.step():
            answers[output.request_id].add(output)
    assert all(answer.finish for answer in answers.values())
    return answers


def prompt(index: int, length: int) -> list[int]:
    return [3 + (index * 131 + i * i * 7 + i) % 380 for i in range(length)]


def crowd() -> list[EngineRequest]:
    """Requests of many kinds; every second one has no grammar."""
    lengths = (5, 40, 17, 9, 33, 1, 16, 64)
    params: list[dict[str, Any]] = [
        {"logprobs": 3},
        {"temperature": 0.7, "top_k": 30, "min_p": 0.01},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "logprobs": 1},
        {"temperature": 0, "presence_penalty": 0.3},
    ]
    return [
        request(
            str(i),
            prompt(i, length),
            GRAMMARS[i // 2 % len(GRAMMARS)] if i % 2 == 0 else None,
            **(params[i // 2 % len(params)] | {"max_tokens": 24 + i, "ignore_eos": i % 2 == 1}),
        )
        for i, length in enumerate(lengths)
    ]


def same(answers: dict[str, Answer], wanted: dict[str, Answer], atol: float = 1e-5) -> None:
    """Assert that answers are the wanted ones: to the token, and in their logprobs to `atol`."""
    for key, answer in answers.items():
        due = wanted[key]
        assert answer.tokens == due.tokens, key
        assert (answer.finish, answer.stop_reason) == (due.finish, due.stop_reason)
        for given, its in zip(answer.logprobs, due.logprobs, strict=True):
            assert given.token_ids == its.token_ids and given.rank == its.rank
            assert given.logprobs == pytest.approx(its.logprobs, abs=atol)
