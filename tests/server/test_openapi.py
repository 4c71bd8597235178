"""The server's own description: it is valid, says all there is, and is true."""

import json

import jsonschema
import pytest

from jaxllm import SamplingParams, ValidationError
from jaxllm.openai import endpoints as openai
from jaxllm.openai.schema import request_schemas
from jaxllm.openai.served_model import ServedModel
from jaxllm.server.auth import Keys
from jaxllm.server.endpoint import Access
from jaxllm.server.endpoints import ENDPOINTS
from jaxllm.server.openapi import make_document

NEEDED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
}
SERVED = ServedModel(
    names=("m",),
    tokenizer=None,
    default_params=SamplingParams(),
    fingerprint="fp",
    max_model_len=100,
)


def guarded_by(document, key):
    """The paths that want a key of this kind."""
    wanted = {"security": [{key: []}]}.items()
    return {
        path
        for path, item in document["paths"].items()
        if all(wanted <= operation.items() for operation in item.values())
    }


@pytest.mark.parametrize("keys", [Keys(), Keys(api=("k",)), Keys(api=("k",), admin=("a",))])
def test_the_document_is_an_openapi_document(keys):
    document = make_document(ENDPOINTS, keys)
    import schemathesis  # which takes a second

    schemathesis.openapi.from_dict(document).validate()
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    is_open = (Access.ANYBODY, Access.WITHOUT_KEY)
    open_paths = {one.path for one in ENDPOINTS if one.access in is_open}
    of_admins = {one.path for one in ENDPOINTS if one.access is Access.ADMIN and keys.admin}
    of_users = document["paths"].keys() - open_paths - of_admins if keys.api else set()
    assert guarded_by(document, "key") == of_users
    assert guarded_by(document, "admin_key") == of_admins


def test_all_references_lead_somewhere():
    document = make_document(ENDPOINTS, Keys(api=("k",)))
    text = json.dumps(document)
    schemas = document["components"]["schemas"]
    found = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    # Each is used, and there.
    assert found == schemas.keys()


def bounds():
    """Each numeric bound that the schemas tell, with a value within it and one beyond it."""
    for path, (kind, *_) in openai.ENDPOINTS.items():
        schema = request_schemas([kind])[kind.__name__]
        for name, field in schema["properties"].items():
            is_integer = "'integer'" in str(field)
            if not is_integer and "'number'" not in str(field):
                continue
            step = 1 if is_integer else 1e-6
            if "minimum" in field:
                yield path, name, field["minimum"], field["minimum"] - step
            if "exclusiveMinimum" in field:
                yield path, name, field["exclusiveMinimum"] + step, field["exclusiveMinimum"]
            if "maximum" in field:
                yield path, name, field["maximum"], field["maximum"] + step


# These need more than one field, or are checked by what the engine knows.
ELSEWHERE = {
    "length_penalty", "priority", "truncate_prompt_tokens", "max_tokens", "min_tokens",
    "top_logprobs",
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "name", "inside", "outside"), [one for one in bounds() if one[1] not in ELSEWHERE]
)
def test_bounds_are_those_of_the_server(path, name, inside, outside):
    kind = openai.ENDPOINTS[path].request
    kind.read(NEEDED[path] | {name: inside}, live=True).sampling_params(SERVED)
    with pytest.raises(ValidationError):
        kind.read(NEEDED[path] | {name: outside}, live=True).sampling_params(SERVED)
