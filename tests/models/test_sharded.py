"""Every part of a model is among those that test_parity.py cuts over devices."""

import dataclasses

from jaxllm.models.architecture import read_architecture
from jaxllm.testing import tiny_config
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


def test_every_part_of_a_model_is_cut_in_some_case():
    def parts(cases):
        configs = (tiny_config(case["family"]) | case["config"] for case in cases)
        read = [read_architecture(config | {"dtype": "float32"}) for config in configs]
        return {part for architecture in read for part in parts_of(architecture)}

    missing = parts(CASES.values()) - parts(CUT.values())
    assert not missing
