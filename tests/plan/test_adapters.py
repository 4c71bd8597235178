"""The plan of an engine with adapters: their memory, their programs, and where there are none."""

import pytest

from jaxllm import UnsupportedModelError, ValidationError
from jaxllm.config import EngineConfig
from jaxllm.lora.catalog import AdapterCatalog
from jaxllm.lora.request import LoRARequest
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer, num_programs
from jaxllm.programs.summary import summary
from jaxllm.testing import make_tiny_adapter, make_tiny_checkpoint
from tests.profile import TINY

LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plan(model):
    return make_plan(EngineConfig.create(model, **TINY, **LORA))


def test_its_bytes_are_those_of_all_slots(plan):
    # Inputs of each part of a fused layer, and outputs, in float32; two layers.
    sizes = [3 * 64 + 64 + 32 + 32, 64 + 64, 2 * 64 + 2 * 128, 128 + 64]
    assert plan.adapters.bytes_by_stage == (3 * 8 * 4 * 2 * sum(sizes),)
    assert "3 slots of rank 8" in summary(plan)


def test_every_step_has_a_variant_and_two_programs_are_added(plan, model):
    plain = make_plan(EngineConfig.create(model, **TINY))
    assert len(plan.buckets) == 2 * len(plain.buckets)
    assert set(plain.buckets) < set(plan.buckets)
    declared = declare_programs(plan, make_packer(plan).layouts)
    assert num_programs(plan) == len(declared)


def test_where_there_are_none_it_is_said(tmp_path):
    model = make_tiny_checkpoint(tmp_path, family="gpt2")
    with pytest.raises(UnsupportedModelError, match="no layer that adapters can change"):
        make_plan(EngineConfig.create(model, **TINY, **LORA))


def test_files_are_checked_again_when_they_have_changed(plan, model, tmp_path):
    catalog = AdapterCatalog(plan.info().adapters)
    lora = LoRARequest("a", 1, make_tiny_adapter(tmp_path, model))
    first = catalog.check(lora)
    assert catalog.check(lora) == first
    make_tiny_adapter(tmp_path, model, seed=2)
    assert catalog.check(lora).content != first.content
    make_tiny_adapter(tmp_path, model, rank=9)
    with pytest.raises(ValidationError, match="max_lora_rank=8"):
        catalog.check(lora)
