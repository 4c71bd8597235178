"""The engine's option `structured_outputs_config`, with vLLM's names."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from jaxllm.errors import refused
from jaxllm.parsers.reasoning.registry import find_reasoning_format

_NAME = "structured_outputs_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig:
    """How forms of answers are followed."""

    backend: str = "auto"  # llguidance
    disable_any_whitespace: bool = False  # JSON without white space
    disable_additional_properties: bool = False  # in objects whose schema does not say
    # The form of the reasoning of models that reason, for requests that no server or batch parses.
    reasoning_parser: str = ""
    enable_in_reasoning: bool = False  # the form begins with the answer

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Self:
        """Read the option; raise ValidationError."""
        given = dict(given or {})
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        for name, value in given.items():
            if name not in kinds:
                raise refused(f"{_NAME}.{name}", value, f"no such field; use {', '.join(kinds)}")
            if type(value) is not kinds[name]:
                wanted = "true or false" if kinds[name] is bool else "a string"
                raise refused(f"{_NAME}.{name}", value, f"it must be {wanted}")
        config = cls(**given)
        if config.backend not in ("auto", "guidance"):
            raise refused(
                f"{_NAME}.backend", config.backend, "llguidance is the one; use auto or guidance"
            )
        if config.reasoning_parser:
            find_reasoning_format(config.reasoning_parser)
        return config
