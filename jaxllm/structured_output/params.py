"""What a request asks of the form of its answer, with the names that vLLM's users know."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from jaxllm.errors import ValidationError, refused
from jaxllm.files import is_nested_deeper

MAX_SCHEMA_DEPTH = 64
MAX_TAG_DEPTH = 80  # of a structural tag, which has schemas inside
MAX_FORM_CHARS = 1 << 20  # of everything that one request asks

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# Kinds with JSON in them, to which the options of white space apply.
_WITH_JSON = ("json", "json_object", "structural_tag")

FORMER_NAMES = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json_object": "structured_outputs.json_object",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
    "guided_decoding": "structured_outputs",
    "guided_decoding_backend": "the engine's structured_outputs_config",
}


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The form of an answer: exactly one of the first six fields, and options of its JSON."""

    json: str | dict[str, Any] | None = None  # a JSON schema
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # Lark, or EBNF as of llama.cpp and xgrammar
    json_object: bool | None = None
    structural_tag: str | None = None  # a JSON object
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None  # a regex of the white space at one place

    def __post_init__(self) -> None:
        self.validate()

    @classmethod
    def of(cls, given: object) -> "StructuredOutputsParams":
        """Make it of a dict; raise ValidationError."""
        if isinstance(given, StructuredOutputsParams):
            return given
        if not isinstance(given, Mapping):
            raise refused("structured_outputs", given, "it must be a StructuredOutputsParams")
        for name in given:
            if name not in cls.__struct_fields__:
                known = ", ".join(cls.__struct_fields__)
                raise refused(_in(str(name)), given[name], f"no such field; use {known}")
        return cls(**given)

    @property
    def kind(self) -> str:
        """The name of the field that says the form."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def validate(self) -> None:
        """Check all that can be checked without the tokenizer; raise ValidationError."""
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValidationError(
                f"structured_outputs: give exactly one of {', '.join(KINDS)}; "
                f"{' and '.join(given) or 'none'} was given",
                parameter="structured_outputs",
            )
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise refused(_in(name), getattr(self, name), "it must be True or False")
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        for name in ("regex", "whitespace_pattern"):
            if "\0" in (getattr(self, name) or ""):
                raise refused(_in(name), getattr(self, name), r"write \x00 for the character NUL")
        if self.whitespace_pattern is not None:
            if self.disable_any_whitespace:
                raise refused(
                    _in("whitespace_pattern"),
                    self.whitespace_pattern,
                    "disable_any_whitespace=True contradicts it; give one of them",
                )
            if given[0] not in _WITH_JSON:
                raise refused(
                    _in("whitespace_pattern"),
                    self.whitespace_pattern,
                    f"it is for {', '.join(_WITH_JSON)}; leave it out with {given[0]}",
                )
        if self.json is not None:
            self.schema()
        if self.choice is not None:
            _check_choice(self.choice)
        if self.json_object is not None and self.json_object is not True:
            raise refused(_in("json_object"), self.json_object, "give True, or leave it out")
        if self.structural_tag is not None:
            self.tag()

    def schema(self) -> dict[str, Any]:
        """The JSON schema of `json`."""
        if isinstance(self.json, str):
            _check_text("json", self.json)
            return parsed_object("json", self.json, MAX_SCHEMA_DEPTH)
        if not isinstance(self.json, dict):
            raise refused(_in("json"), self.json, "it must be a JSON schema, as a dict or a string")
        if is_nested_deeper(self.json, MAX_SCHEMA_DEPTH):
            raise _too_deep("json", MAX_SCHEMA_DEPTH)
        try:
            text = json.dumps(self.json, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise refused(_in("json"), self.json, f"it must be plain JSON: {error}") from None
        check_length("json", len(text))
        return self.json

    def tag(self) -> dict[str, Any]:
        """The object of `structural_tag`."""
        return parsed_object("structural_tag", str(self.structural_tag), MAX_TAG_DEPTH)


def parsed_object(name: str, text: str, max_depth: int) -> dict[str, Any]:
    """Parse a JSON object; raise ValidationError."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep(name, max_depth) from None
    except ValueError as error:
        raise refused(_in(name), text, f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise refused(_in(name), text, "it must be a JSON object")
    if is_nested_deeper(value, max_depth):
        raise _too_deep(name, max_depth)
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def check_length(name: str, num_chars: int) -> None:
    """Refuse a form that is too long."""
    if num_chars > MAX_FORM_CHARS:
        given = f"{num_chars} characters"
        raise refused(_in(name), given, f"at most {MAX_FORM_CHARS} are allowed")


def _in(name: str) -> str:
    return f"structured_outputs.{name}"


def _too_deep(name: str, max_depth: int) -> ValidationError:
    return ValidationError(
        f"{_in(name)} is nested deeper than {max_depth} levels", parameter=_in(name)
    )


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise refused(_in(name), value, "it must be a string that is not empty")
    check_length(name, len(value))
    try:
        value.encode()
    except UnicodeEncodeError:
        raise refused(_in(name), value, "it holds half a surrogate pair") from None


def _check_choice(choice: object) -> None:
    if not isinstance(choice, list) or not choice:
        raise refused(_in("choice"), choice, "it must be a list of strings that is not empty")
    for text in choice:
        _check_text("choice", text)
    check_length("choice", sum(map(len, choice)))
