"""Plans of models whose layers share caches, or have heads of different sizes."""

import dataclasses

import jax
import pytest

from jaxllm.config import EngineArgs
from jaxllm.errors import ValidationError
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.report import roofline
from jaxllm.testing import make_tiny_checkpoint

SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL]
SHARING = {"num_hidden_layers": 6, "layer_types": KINDS, "num_kv_shared_layers": 3}
OPTIONS = {"max_model_len": 64, "num_gpu_blocks_override": 64}


@pytest.fixture
def make_model(tmp_path):
    return lambda **fields: str(make_tiny_checkpoint(tmp_path, "gemma4", **SHARING | fields))


def test_a_plan_has_caches_for_the_layers_that_own_them(make_model):
    (stage,) = make_plan(EngineArgs(model=make_model(), **OPTIONS)).stages
    assert [config.sliding_window for config in stage.attention_configs] == [8, 8, None]
    assert [config.head_size for config in stage.attention_configs] == [16, 16, 32]
    assert len(stage.cache_shapes) == len(stage.block_bytes) == 3


def test_a_bound_counts_the_caches_of_all_layers_that_read_them(make_model):
    plan = make_plan(EngineArgs(model=make_model(), **OPTIONS))
    chip = dataclasses.replace(plan.chip, hbm_bytes_per_second=1e6, bf16_flops_per_second=1e18)
    line = roofline(dataclasses.replace(plan, chip=chip), *plan.stages)
    full, windows = line.windows
    per_token = [size / plan.block_size for size in plan.stages[0].block_bytes]
    assert (full.size, full.bytes_per_token) == (0, 2 * per_token[2])
    assert (windows.size, windows.bytes_per_token) == (8, 4 * per_token[0])
    assert (full.flops_per_attended, windows.flops_per_attended) == (2 * 4 * 4 * 32, 4 * 4 * 4 * 16)
    # Embeddings are looked up, but the first one is the head, too.
    of_layers = 400 * 6 * 16 * 4
    assert line.bytes_per_step == plan.weights_bytes - of_layers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "pipeline_parallel_size=2: .*only the first stage gets tokens; set it to 1"),
        (
            {"hidden_size_per_layer_input": 0},
            "pipeline_parallel_size=2: layer 3 .* keys and values of layer 1.* lower it",
        ),
    ],
)
def test_stages_without_what_their_layers_need_are_refused(make_model, fields, message):
    devices = jax.devices()[:1] * 2
    with pytest.raises(ValidationError, match=message) as caught:
        make_plan(EngineArgs(model=make_model(**fields), pipeline_parallel_size=2), devices)
    assert caught.value.parameter == "pipeline_parallel_size"


def test_layers_that_do_not_share_may_be_in_stages(make_model):
    devices = jax.devices()[:1] * 2
    model = make_model(hidden_size_per_layer_input=0, num_kv_shared_layers=0)
    plan = make_plan(EngineArgs(model=model, pipeline_parallel_size=2, **OPTIONS), devices)
    assert [len(stage.cache_shapes) for stage in plan.stages] == [3, 3]
