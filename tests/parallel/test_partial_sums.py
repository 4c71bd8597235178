"""Products whose sums go over devices, in numbers and as a compiler for TPUs makes them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxllm_kernels.dense.api import XLA
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import EngineArgs
from jaxllm.layers.linear import Product
from jaxllm.parallel.partial_sums import RoundedParts
from jaxllm.parallel.sharding import make_mesh, sharding
from jaxllm.runner.plan import make_plan
from jaxllm.testing import make_tiny_checkpoint


@pytest.mark.parametrize(("dtype", "error"), [(jnp.float32, 0), (jnp.bfloat16, 2**-8)])
def test_a_product_is_rounded_once_and_in_float32_not_at_all(dtype, error):
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((7, 96), (5, 96)))
    exact, rounded = XLA(x, weight), RoundedParts()(x, weight)
    assert rounded.dtype == jnp.float32
    np.testing.assert_allclose(rounded, exact, rtol=error, atol=1e-4 if error else 0)


@pytest.mark.tpu_compile
def test_what_devices_add_up_is_rounded_first(tmp_path):
    pytest.importorskip("libtpu")
    devices = topology_devices("v5e-8")
    model_dir = str(make_tiny_checkpoint(tmp_path, num_attention_heads=8))
    args = EngineArgs(
        model=model_dir, dtype="bfloat16", tensor_parallel_size=8, num_gpu_blocks_override=64,
        max_num_seqs=4, max_num_batched_tokens=16,
    )  # fmt: skip
    plan = make_plan(args, devices)
    model = plan.abstract_model(*plan.stages)
    chosen = {
        str(path[-1]): module.matmul
        for path, module in nnx.iter_modules(model)
        if isinstance(module, Product)
    }
    rounded = {name for name, matmul in chosen.items() if matmul == RoundedParts()}
    assert rounded == {"o_proj", "down_proj"} and len(chosen) > 3

    mesh = make_mesh(devices)

    def operands(matmul):
        """What the devices of a product whose sum goes over them add up."""
        x = jax.ShapeDtypeStruct((64, 4096), "bfloat16", sharding=sharding(mesh, (None, "mlp")))
        weight = jax.ShapeDtypeStruct((512, 4096), "bfloat16", sharding=x.sharding)
        product = jax.jit(lambda x, w: matmul(x, w).astype(x.dtype), out_shardings=sharding(mesh))
        hlo = product.lower(x, weight).compile().as_text()
        (operand,) = re.findall(r" all-reduce\(%([\w.\-]+)\)", hlo)
        return re.search(rf"%{re.escape(operand)} = (\w+)", hlo)[1]

    assert operands(RoundedParts()) == "bf16"
    assert operands(XLA) == "f32"
