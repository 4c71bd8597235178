"""The field `response_format`, and how it becomes a form of the answer."""

import json
from typing import Any, Literal

import msgspec

from jaxllm.errors import ValidationError
from jaxllm.sampling_params import StructuredOutputsParams


class JSONSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema with a name. It is followed whether it is strict or not."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The form of the content. The last three fields are those of a structural tag."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JSONSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    def over(self, given: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """The form, with the options of `structured_outputs`; raise ValidationError."""
        self._check_fields()
        if self.type == "text":
            return given
        if self.type == "json_object":
            asked: dict[str, Any] = {"json_object": True}
        elif self.type == "json_schema":
            if self.json_schema is None or self.json_schema.schema is None:
                raise _wrong("response_format.json_schema", "give an object with name and schema")
            asked = {"json": self.json_schema.schema}
        else:
            asked = {"structural_tag": json.dumps(msgspec.to_builtins(self))}
        if given is None:
            return StructuredOutputsParams(**asked)
        (kind,) = asked
        if given.kind != kind:
            raise _wrong(
                "response_format",
                f"structured_outputs.{given.kind} says otherwise; give one of them",
            )
        return msgspec.structs.replace(given, **asked)

    @property
    def names(self) -> dict[str, str]:
        """The engine's names of the form's fields -> those here."""
        return {
            "structured_outputs.json": "response_format.json_schema.schema",
            "structured_outputs.json_object": "response_format",
            "structured_outputs.structural_tag": "response_format",
        }

    def _check_fields(self) -> None:
        """Refuse fields of other types of format."""
        own = {
            "json_schema": ("json_schema",),
            "structural_tag": ("format", "structures", "triggers"),
        }
        for name in ("json_schema", "format", "structures", "triggers"):
            if getattr(self, name) is not None and name not in own.get(self.type, ()):
                raise _wrong(f"response_format.{name}", f"type={self.type!r} has no such field")
        if self.json_schema is not None and not 1 <= len(self.json_schema.name) <= 64:
            raise _wrong("response_format.json_schema.name", "a name has 1 to 64 characters")


def _wrong(field: str, why: str) -> ValidationError:
    return ValidationError(f"{field}: {why}", parameter=field)
