"""What is read of a config.json, against the config classes of transformers."""

import pytest
from huggingface_hub.errors import StrictDataclassError

from jaxllm.errors import CheckpointError, UnsupportedModelError
from jaxllm.models.harmless import HARMLESS
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.registry import family_names, load_family
from jaxllm.testing import tiny_config


def filled(fields):
    """The fields of a config.json, and what its class in transformers adds."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[fields["model_type"]](**fields).to_dict()


def read(family, fields):
    """What a family makes of a config.json, or its error; and the fields that it read."""
    config = HFConfig(fields)
    try:
        config.refuse_unsupported()
        return family.read(fields["architectures"][0], config), config.fields_read
    except (CheckpointError, UnsupportedModelError) as error:
        return str(error), config.fields_read


@pytest.mark.parametrize("name", family_names())
def test_every_field_of_the_class_is_read_or_harmless(name):
    family, tiny = load_family(name), tiny_config(name)
    fields = filled({field: value for field, value in tiny.items() if value is not None})
    _, names = read(family, fields)
    assert sorted(fields.keys() - names - HARMLESS.keys() - family.harmless.keys()) == []
    assert all(HARMLESS.values()) and all(family.harmless.values()), "there is no reason"


# generation_config.json has the tokens that end a text; a config without them names none.
@pytest.mark.parametrize("name", family_names())
def test_a_field_that_is_left_out_has_the_default_of_the_class(name):
    family, tiny = load_family(name), tiny_config(name)
    for left_out in sorted(tiny.keys() - {"architectures", "model_type", "eos_token_id"}):
        fields = {field: value for field, value in tiny.items() if field != left_out}
        ours, _ = read(family, fields)
        if ours == f"config.json: {left_out} is missing":  # such a field is in every file
            continue
        try:
            theirs, _ = read(family, filled(fields))
        except StrictDataclassError:  # the default does not fit the other fields
            assert isinstance(ours, str), left_out
        else:
            assert ours == theirs, left_out
