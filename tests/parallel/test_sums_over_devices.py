"""Products whose sums go over devices, as a compiler for TPUs makes them."""

import re
import subprocess
import sys

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


CUT = """
import os
os.environ["JAX_NUM_CPU_DEVICES"] = "2"
os.environ["JAX_PLATFORMS"] = "cpu"
from dataclasses import replace

import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh
from jaxllm_kernels.coded import CodeForm
from jaxllm_kernels.coded_cases import random_weight
from jaxllm_kernels.dense.api import XLA_CODED
from jaxllm_kernels.dense.tpu import TpuCodedMatmul

class OnDevices(TpuCodedMatmul):
    "With XLA's product on each device, in place of the kernel."
    def _multiply(self, x, weight):
        return XLA_CODED(x, weight)

random = np.random.default_rng(0)
x = jnp.asarray(random.standard_normal((3, 512)), jnp.float32)
weight = random_weight(random, (256, 512), CodeForm(codes="int8", group=128))
mesh = Mesh(np.array(jax.devices()), ("tensor",))
op = OnDevices(chip="v7x", mesh=mesh)
for cut in ((None, None), ("tensor", None), (None, "tensor")):
    y = jax.jit(replace(op, cut=cut))(x, weight)
    np.testing.assert_allclose(y, XLA_CODED(x, weight), rtol=2e-5, atol=1e-6 * abs(y).max())
print("all are equal")
"""


def test_products_with_codes_may_be_cut_by_outputs_and_by_inputs():
    done = subprocess.run([sys.executable, "-c", CUT], capture_output=True, text=True, check=False)
    assert done.stdout == "all are equal\n", done.stderr
