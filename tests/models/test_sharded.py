"""Every part of a model, and every form of its weights in checkpoints, is among those that
test_parity.py cuts over devices."""

import dataclasses

import pytest

from jaxllm.models.architecture import read_architecture
from jaxllm.models.registry import ModelRegistry
from jaxllm.parallel.sharding import partition_spec
from jaxllm.testing import tiny_config
from jaxllm.weights.loader import parameters_of, sources_of
from tests.models.cut import CASES, CUT


def parts_of(spec):
    """What a record and those inside are made of: its classes, and which fields are set. Numbers
    and names of functions count as set, since they do not matter to a cut."""
    found = set()
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if not field.compare or field.name == "rope":  # it is the same for all heads
            continue
        for one in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(one):
                found |= parts_of(one)
            is_choice = one is None or isinstance(one, bool | type) or field.name == "kv"
            found.add((type(spec).__name__, field.name, one if is_choice else type(one).__name__))
    return found


def classes_of(source):
    """The classes of a source and of those inside."""
    values = [getattr(source, field.name) for field in dataclasses.fields(source)]
    inside = [one for value in values for one in (value if isinstance(value, tuple) else (value,))]
    its = {classes_of(one) for one in inside if dataclasses.is_dataclass(one)}
    return type(source).__name__, frozenset(its)


def forms_of(architecture):
    """Of each array that is cut: what the checkpoint has, the axes, and whether parts are fused."""
    model = ModelRegistry.resolve([architecture.name]).abstract(architecture, "float32", 2)
    parameters = parameters_of(model)
    return {
        (classes_of(source), parameters[name].axes, bool(parameters[name].parts))
        for name, source in sources_of(parameters, model.checkpoint_map).items()
        if any(partition_spec(parameters[name].axes))
    }


@pytest.mark.parametrize("found_in", [parts_of, forms_of])
def test_each_part_of_a_model_and_each_form_of_weights_is_cut_in_some_case(found_in):
    def found(cases):
        configs = (tiny_config(case["family"]) | case["config"] for case in cases)
        read = [read_architecture(config | {"dtype": "float32"}) for config in configs]
        return {one for architecture in read for one in found_in(architecture)}

    missing = found(CASES.values()) - found(CUT.values())
    assert not missing
