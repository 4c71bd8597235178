"""What a request asks is one form, or refused by the name of the field."""

import json

import msgspec
import pytest

from jaxllm import SamplingParams, StructuredOutputsParams, ValidationError
from jaxllm.sampling_params import BeamSearchParams
from jaxllm.structured_output.options import StructuredOutputsConfig
from jaxllm.structured_output.params import KINDS

GIVEN = {
    "json": {"type": "object"},
    "regex": "a+",
    "choice": ["a", "b"],
    "grammar": 'root ::= "a"',
    "json_object": True,
    "structural_tag": '{"format": {"type": "any_text"}}',
}


def nested(depth):
    return json.loads('{"a":' * depth + "{}" + "}" * depth)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_taken_as_an_object_or_a_dict(kind):
    params = StructuredOutputsParams(**{kind: GIVEN[kind]})
    assert params.kind == kind
    for given in (params, {kind: GIVEN[kind]}):
        assert SamplingParams(structured_outputs=given).structured_outputs == params
    there = msgspec.msgpack.decode(
        msgspec.msgpack.encode(SamplingParams(structured_outputs=params)), type=SamplingParams
    )
    assert there.structured_outputs == params


def test_a_schema_may_be_text():
    assert StructuredOutputsParams(json='{"type": "null"}').schema() == {"type": "null"}


@pytest.mark.parametrize(
    ("given", "field", "why"),
    [
        ({}, "", "exactly one"),
        ({"regex": "a", "choice": ["a"]}, "", "regex and choice was given"),
        ({"json": ""}, ".json", "not empty"),
        ({"json": "{"}, ".json", "not JSON"),
        ({"json": "[1]"}, ".json", "JSON object"),
        ({"json": '{"maximum": NaN}'}, ".json", "NaN"),
        ({"json": 3}, ".json", "JSON schema"),
        ({"json": {"a": {1, 2}}}, ".json", "plain JSON"),
        ({"json": nested(65)}, ".json", "deeper than 64"),
        ({"json": '{"a":' * 2000 + "1" + "}" * 2000}, ".json", "deeper than 64"),
        ({"json": {"description": "x" * (1 << 20)}}, ".json", "at most 1048576"),
        ({"regex": ""}, ".regex", "not empty"),
        ({"regex": "a\0"}, ".regex", "NUL"),
        ({"regex": "\ud800"}, ".regex", "surrogate"),
        ({"regex": 3}, ".regex", "string"),
        ({"choice": []}, ".choice", "not empty"),
        ({"choice": [""]}, ".choice", "not empty"),
        ({"choice": "a"}, ".choice", "list"),
        ({"choice": ["a", 1]}, ".choice", "string"),
        ({"grammar": ""}, ".grammar", "not empty"),
        ({"json_object": False}, ".json_object", "give True"),
        ({"json_object": 1}, ".json_object", "give True"),
        ({"structural_tag": ""}, ".structural_tag", "not empty"),
        ({"structural_tag": "[]"}, ".structural_tag", "JSON object"),
        ({"structural_tag": '{"a":' * 90 + "1" + "}" * 90}, ".structural_tag", "deeper than 80"),
        ({"json_object": True, "whitespace_pattern": ""}, ".whitespace_pattern", "not empty"),
        ({"regex": "a", "whitespace_pattern": " "}, ".whitespace_pattern", "leave it out"),
        (
            {"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True},
            ".whitespace_pattern",
            "contradicts",
        ),
        ({"json_object": True, "disable_any_whitespace": 1}, ".disable_any_whitespace", "True or"),
        ({"jsn": {}}, ".jsn", "no such field"),
    ],
)
def test_what_is_wrong_is_refused_by_name(given, field, why):
    with pytest.raises(ValidationError, match=why) as caught:
        SamplingParams(structured_outputs=given)
    assert caught.value.parameter == f"structured_outputs{field}"


def test_former_names_and_beam_search_are_refused():
    with pytest.raises(ValidationError, match="guided_decoding=.*now called structured_outputs"):
        SamplingParams(guided_decoding={"json": {}})
    with pytest.raises(ValidationError, match="structured_outputs=.*beam search"):
        BeamSearchParams(beam_width=2, max_tokens=3, structured_outputs={"regex": "a"})
    with pytest.raises(ValidationError, match="it must be a StructuredOutputsParams"):
        SamplingParams(structured_outputs="json")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"backend": "xgrammar"}, r"structured_outputs_config.backend='xgrammar'"),
        ({"backnd": "auto"}, "structured_outputs_config.backnd='auto': no such field"),
        ({"enable_in_reasoning": 1}, "enable_in_reasoning=1: it must be true or false"),
        ({"reasoning_parser": "none"}, "reasoning_parser='none'"),
    ],
)
def test_wrong_options_of_the_engine_are_refused(given, why):
    with pytest.raises(ValidationError, match=why):
        StructuredOutputsConfig.of(given)
    assert StructuredOutputsConfig.of({"backend": "guidance"}).backend == "guidance"
