import jax
import pytest

from jaxllm.config import EngineArgs
from jaxllm.errors import ValidationError
from jaxllm.plan.make_plan import make_plan
from jaxllm.testing import make_tiny_checkpoint


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 144}
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("m"), hidden_size=96, **sizes))


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (4, "tensor_parallel_size=4: it does not divide the model's num_attention_heads=6"),
        (3, "neither a divisor nor a multiple of the model's num_key_value_heads=2"),
        (64, "tensor_parallel_size=64, but there are 8 devices"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(size, message, model_dir):
    devices = jax.devices()[:1] * 8
    args = EngineArgs(model=model_dir, tensor_parallel_size=size)
    with pytest.raises(ValidationError, match=message):
        make_plan(args, devices)


def test_more_stages_than_layers_or_devices_are_refused_by_name(model_dir):
    devices = jax.devices()[:1] * 8
    for options, message in (
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size=3: .*num_hidden_layers=2"),
        (
            {"pipeline_parallel_size": 5, "tensor_parallel_size": 2},
            "5 stages with tensor_parallel_size=2 want 10 devices, and there are 8",
        ),
    ):
        with pytest.raises(ValidationError, match=message) as caught:
            make_plan(EngineArgs(model=model_dir, **options), devices)
        assert caught.value.parameter == "pipeline_parallel_size"


def test_the_stage_with_least_room_decides_how_many_blocks_there_are(tmp_path):
    devices = jax.devices()[:1] * 2
    model_dir = str(make_tiny_checkpoint(tmp_path, num_hidden_layers=5))
    options = {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 20}
    whole = make_plan(EngineArgs(model=model_dir, **options), devices)
    plan = make_plan(EngineArgs(model=model_dir, pipeline_parallel_size=2, **options), devices)
    first, last = plan.stages
    assert [len(stage.cache_shapes) for stage in plan.stages] == [3, 2]
    assert whole.num_blocks < plan.num_blocks
    assert plan.num_blocks == (1 << 20) // (first.kv_cache_bytes // plan.num_blocks)
    assert last.kv_cache_bytes < first.kv_cache_bytes == plan.kv_cache_bytes <= 1 << 20
    assert plan.weights_bytes < whole.weights_bytes
    assert sum(stage.weights_bytes for stage in plan.stages) == whole.weights_bytes
    assert plan.num_devices == 2
