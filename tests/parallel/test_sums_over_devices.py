"""Products whose sums go over devices, as a compiler for TPUs makes them."""

import re

import jax
import pytest
from flax import nnx
from jaxllm_kernels.dense.api import ROUNDED_XLA, XLA
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import EngineArgs
from jaxllm.layers.linear import Product
from jaxllm.parallel.sharding import make_mesh, sharding
from jaxllm.plan.make_plan import make_plan
from jaxllm.testing import make_tiny_checkpoint


@pytest.mark.tpu_compile
def test_what_devices_add_up_is_rounded_first(tmp_path):
    pytest.importorskip("libtpu")
    devices = topology_devices("v5e-8")
    biased = {"attention_bias": True, "mlp_bias": True}
    model_dir = str(make_tiny_checkpoint(tmp_path, num_attention_heads=8, **biased))
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
    rounded = {name for name, matmul in chosen.items() if matmul == ROUNDED_XLA}
    # Before their biases, which others add to sums in float32.
    assert rounded == {"o_proj", "down_proj"} and len(chosen) > len(rounded)

    mesh = make_mesh(devices)

    def operands(matmul):
        """What the devices of a product whose sum goes over them add up."""
        x = jax.ShapeDtypeStruct((64, 4096), "bfloat16", sharding=sharding(mesh, (None, "mlp")))
        weight = jax.ShapeDtypeStruct((512, 4096), "bfloat16", sharding=x.sharding)
        product = jax.jit(lambda x, w: matmul(x, w).astype(x.dtype), out_shardings=sharding(mesh))
        hlo = product.lower(x, weight).compile().as_text()
        (operand,) = re.findall(r" all-reduce\(%([\w.\-]+)\)", hlo)
        return re.search(rf"%{re.escape(operand)} = (\w+)", hlo)[1]

    assert operands(ROUNDED_XLA) == "bf16"
    assert operands(XLA) == "f32"
