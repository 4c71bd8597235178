"""What a request asks, as one grammar for llguidance."""

from collections.abc import Mapping

from jaxllm.parsers.reasoning.base import ReasoningFormat, Start
from jaxllm.structured_output.options import StructuredOutputsConfig
from jaxllm.structured_output.params import StructuredOutputsParams
from jaxllm.structured_output.reasoning import after_reasoning
from jaxllm.structured_output.regex import to_rust
from jaxllm.structured_output.schemas import JSONOptions
from jaxllm.structured_output.tags import write_grammar, write_tag
from jaxllm.structured_output.writer import BadPart, Grammar, GrammarWriter


def make_grammar(
    params: StructuredOutputsParams,
    config: StructuredOutputsConfig,
    special_tokens: Mapping[str, int],
    reasoning: tuple[ReasoningFormat, Start] | None = None,
) -> Grammar:
    """Write the grammar of an answer; raise BadPart with the field that cannot be followed."""
    writer = GrammarWriter(special_tokens, _json_options(params, config))
    form = _form(writer, params)
    if reasoning is not None:
        form = after_reasoning(writer, form, *reasoning)
    return writer.finish(form)


def _form(writer: GrammarWriter, params: StructuredOutputsParams) -> str:
    field = f"structured_outputs.{params.kind}"
    if params.json is not None:
        return writer.json(field, params.schema())
    if params.json_object is not None:
        return writer.json(field, {"type": "object"})
    if params.regex is not None:
        return writer.regex(field, params.regex)
    if params.choice is not None:
        return writer.choice(params.choice)
    if params.grammar is not None:
        return write_grammar(writer, field, params.grammar)
    return write_tag(writer, field, params.tag())


def _json_options(params: StructuredOutputsParams, config: StructuredOutputsConfig) -> JSONOptions:
    pattern = params.whitespace_pattern
    if pattern is not None:
        try:
            pattern = to_rust(pattern)
        except ValueError as error:
            raise BadPart("structured_outputs.whitespace_pattern", str(error)) from None
    compact = params.disable_any_whitespace or config.disable_any_whitespace
    closed = params.disable_additional_properties or config.disable_additional_properties
    return JSONOptions(
        any_whitespace=not compact or pattern is not None,
        whitespace_pattern=pattern,
        additional_properties=not closed,
    )
