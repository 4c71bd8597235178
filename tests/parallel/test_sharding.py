import jax
import pytest

from jaxllm.config import EngineArgs
from jaxllm.errors import ValidationError
from jaxllm.runner.plan import make_plan
from jaxllm.testing import make_tiny_checkpoint


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 144}
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("m"), hidden_size=96, **sizes))


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (4, "tensor_parallel_size=4 does not divide the model's num_attention_heads=6"),
        (3, "neither a divisor nor a multiple of the model's num_key_value_heads=2"),
        (64, "tensor_parallel_size=64, but there are 8 devices"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(size, message, model_dir):
    devices = jax.devices()[:1] * 8
    args = EngineArgs(model=model_dir, tensor_parallel_size=size)
    with pytest.raises(ValidationError, match=message):
        make_plan(args, devices)
