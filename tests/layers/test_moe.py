"""The module of experts: padding, the shared MLP, and its weights cut over devices."""

import dataclasses
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ValidationError
from jaxllm.layers.mlp import MLPSpec
from jaxllm.layers.moe import MoESpec
from jaxllm.layers.router import RouterSpec

SPEC = MoESpec(
    num_experts=8,
    num_choices=2,
    intermediate_size=16,
    router=RouterSpec(scores="softmax", normalises=True),
)


def test_what_does_not_divide_is_refused():
    with pytest.raises(ValidationError, match="tensor_parallel_size=3: .* intermediate_size of an"):
        SPEC.check(3)
    whole = dataclasses.replace(SPEC, has_whole_experts=True, intermediate_size=15)
    whole.check(8)
    with pytest.raises(ValidationError, match="tensor_parallel_size=16: .* number of experts, 8"):
        whole.check(16)
    shared = dataclasses.replace(SPEC, shared=MLPSpec(intermediate_size=6))
    shared.check(2)
    with pytest.raises(ValidationError, match="tensor_parallel_size=4: .* intermediate_size=6"):
        shared.check(4)


@dataclasses.dataclass(frozen=True)
class Spy:
    """An implementation that notes what it is called with."""

    name: str = "spy"
    calls: list = dataclasses.field(default_factory=list, hash=False, compare=False)

    def __call__(self, x, chosen, factors, weights, *, config):
        self.calls.append((x, chosen, factors, weights, config))
        return jnp.ones(x.shape, jnp.float32)


class Context:
    mesh = expert_tokens = None

    def __init__(self, num_tokens):
        self.num_tokens = num_tokens


def test_padding_chooses_no_expert():
    module = SPEC.make(32, num_shards=1, dtype=jnp.float32)
    module.experts.op = spy = Spy()
    module(jnp.ones((5, 32)), Context(3))
    ((_, chosen, _, weights, _),) = spy.calls
    assert (np.asarray(chosen)[:3] < 8).all() and (np.asarray(chosen)[3:] == 8).all()
    assert weights.gate_up.shape == (8, 2, 16, 32) and weights.down.shape == (8, 32, 16)


@pytest.mark.parametrize("is_gated", [False, True])
def test_the_shared_mlp_is_added(is_gated):
    shared = MLPSpec(intermediate_size=4)
    spec = dataclasses.replace(SPEC, shared=shared, gates_shared=is_gated)
    module = spec.make(32, num_shards=1, dtype=jnp.float32)
    module.experts.op = Spy()
    random = np.random.default_rng(0)
    for linear in (module.shared_experts.gate_up_proj, module.shared_experts.down_proj):
        linear.weight[...] = jnp.asarray(random.standard_normal(linear.weight.shape), jnp.float32)
    x = jnp.asarray(random.standard_normal((3, 32)), jnp.float32)
    added = module.shared_experts(x, Context(3))
    if is_gated:
        gate = jnp.asarray(random.standard_normal((1, 32)), jnp.float32)
        module.shared_expert_gate.weight[...] = gate
        added = added / (1 + jnp.exp(-x @ gate.T))
    np.testing.assert_allclose(module(x, Context(3)), 1 + added, rtol=1e-5, atol=1e-5)


SCRIPT = """
import os
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
os.environ["JAX_PLATFORMS"] = "cpu"
import dataclasses, functools, sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jaxllm.layers.context import StepContext
from jaxllm.layers.moe import MoESpec
from jaxllm.layers.router import RouterSpec
from jaxllm.parallel.sharding import make_mesh, sharding

spec = MoESpec(num_experts=8, num_choices=3, intermediate_size=16, bias=True,
               router=RouterSpec(scores="softmax", normalises=True))
random = np.random.default_rng(0)
x = jnp.asarray(random.standard_normal((9, 32)), jnp.float32)

def run(spec, size):
    random = np.random.default_rng(1)
    module = spec.make(32, num_shards=size, dtype=jnp.float32)
    mesh = make_mesh(jax.devices()[:size])
    graph, state = nnx.split(module)
    def place(leaf):
        values = random.standard_normal(leaf.shape).astype(np.float32)
        axes = leaf.get_metadata()["axes"]
        return leaf.replace(jax.device_put(values, sharding(mesh, axes)))
    state = jax.tree.map(place, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    class Context: num_tokens, expert_tokens = 7, None
    Context.mesh = mesh
    call = jax.jit(lambda state, x: nnx.merge(graph, state)(x, Context))
    compiled = call.lower(state, jax.device_put(x, sharding(mesh))).compile()
    text = compiled.as_text()
    count = sum(line.count(" all-reduce(") + line.count(" all-reduce-start(")
                for line in text.splitlines())
    others = [name for name in ("all-gather", "all-to-all", "collective-permute") if name in text]
    assert (count, others) == (size > 1, []), (count, others)
    return np.asarray(call(state, x))

whole = run(spec, 1)
assert np.abs(whole[:7]).max() > 1 and (whole[7:] == 0).all()
cut_over, spread_over = map(int, sys.argv[1:])
np.testing.assert_allclose(run(spec, cut_over), whole, atol=1e-4)
of_devices = dataclasses.replace(spec, has_whole_experts=True)
np.testing.assert_allclose(run(of_devices, spread_over), whole, atol=1e-4)
"""


@pytest.mark.parametrize(
    ("cut_over", "spread_over"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.sweep)]
)
def test_experts_cut_or_spread_over_devices_compute_the_same_with_one_sum(cut_over, spread_over):
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(cut_over), str(spread_over)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.returncode == 0, process.stderr[-3000:]
