"""Short convolutions on TPUs, emulated on a CPU: results, races, and rows that are skipped."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.causal_conv.cases import FILTERS, TOLERANCES, error
from jaxllm_kernels.causal_conv.tpu import TpuConv
from jaxllm_kernels.recurrent.cases import CASES
from jaxllm_kernels.recurrent.copies import TpuCopies, XlaCopies
from jaxllm_kernels.recurrent.tpu_blocks import chip_named, interpreter
from jaxllm_kernels.recurrent.tpu_slots import read_slots, write_slots

pytestmark = pytest.mark.usefixtures("no_races")

OP = TpuConv(chip="v6e", interpret=True)
# Each kind of row, and slots that are not read.
ALWAYS = [("drafts", "with a bias", "float32"), ("slots pass on", "usual", "bfloat16")]


@pytest.mark.parametrize(
    ("name", "filters", "dtype"),
    [
        *ALWAYS,
        *(pytest.param(name, "usual", "float32", marks=pytest.mark.sweep) for name in CASES),
        *(pytest.param("mixed", it, "bfloat16", marks=pytest.mark.sweep) for it in FILTERS),
    ],
)
def test_cases(name, filters, dtype):
    layer = dataclasses.replace(FILTERS[filters], num_channels=128)
    assert error(OP, name, layer, dtype) < TOLERANCES[dtype]


def test_copies_are_those_of_rows_with_a_slot():
    random = np.random.default_rng(0)
    state, rows = (random.integers(1 << 16, size=(n, 4, 128)).astype(np.uint16) for n in (5, 4))
    # 5 and -1 are no slots.
    slots = jnp.array([3, 5, 0, -1], jnp.int32)
    emulated = interpreter(chip_named("v6e"), True)
    read = read_slots(jnp.asarray(state), slots, after=slots, interpret=emulated)
    np.testing.assert_array_equal(read[jnp.array([0, 2])], state[[3, 0]])
    after = jax.jit(write_slots, static_argnames="interpret")(
        jnp.asarray(state), slots, jnp.asarray(rows), interpret=emulated
    )
    state[[3, 0]] = rows[[0, 2]]
    np.testing.assert_array_equal(after, state)


def test_copies_to_and_from_snapshots_are_those_of_xla():
    random = np.random.default_rng(1)
    shapes, pairs = ((4, 128), (2, 8, 128)), jnp.array([[0, 3], [0, 1], [4, 0], [9, 9]], jnp.int32)
    sources, targets = (
        [jnp.asarray(random.normal(size=(n, *shape)), jnp.float32) for shape in shapes]
        for n in (5, 4)
    )
    for count in (3, 0):
        copied, expected = (
            jax.jit(op)(sources, targets, pairs, jnp.int32(count))
            for op in (TpuCopies(chip="v6e", interpret=True), XlaCopies())
        )
        jax.tree.map(np.testing.assert_array_equal, copied, expected)
