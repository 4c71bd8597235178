"""What a plan says of the second home of KV blocks."""

from types import SimpleNamespace

import pytest

from jaxllm.cli.plan import _offload_lines
from jaxllm.config import EngineConfig
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer, num_programs
from jaxllm.programs.offload import HOST_BYTES_PER_SECOND, report_offload
from jaxllm.programs.roofline import Bound
from jaxllm.programs.summary import summary
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    return make_plan(EngineConfig.create(model, **TINY, kv_offloading_size=0.01))


def test_the_places_take_what_is_asked_for(plan):
    offload = plan.offload
    assert offload.block_bytes == (plan.kv_cache_bytes // plan.num_blocks,)
    assert 0 <= 0.01 * 2**30 - offload.num_bytes < offload.block_bytes[0]
    assert plan.info().host_places == offload.places
    assert f"on the host: {offload.places[0]} blocks of 16" in summary(plan)


def test_two_programs_of_each_group_are_declared(plan):
    declared = declare_programs(plan, make_packer(plan).layouts)
    assert num_programs(plan) == len(declared)
    assert {"read_blocks 0", "write_blocks 0"} <= set(map(str, declared))


@pytest.mark.parametrize(("ratio", "words"), [(13.0, "it pays 13.0 times"), (0.5, "does not pay")])
def test_it_says_whether_it_pays(plan, ratio, words):
    block = plan.offload.block_bytes[0] / HOST_BYTES_PER_SECOND
    chunk = Bound(seconds=ratio * block * 32 / 16, limited_by="arithmetic")
    report = report_offload(plan, [chunk])
    assert report.seconds_to_load == pytest.approx(block)
    assert report.seconds_to_compute == pytest.approx(ratio * block)
    shown = SimpleNamespace(
        offload=report, cache_groups=plan.cache_groups, block_size=plan.block_size
    )
    assert words in _offload_lines(shown)[-1]
    assert len(_offload_lines(SimpleNamespace(**{**vars(shown), "offload": None}))) == 0
    assert report_offload(plan, [None]).seconds_to_load is None
