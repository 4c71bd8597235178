"""Products with codes in groups of inputs on TPUs: emulated on a CPU, and compiled."""

import importlib.util
import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxllm_kernels.coded import CodedWeight, CodeForm, values
from jaxllm_kernels.coded_cases import FORMS, random_weight
from jaxllm_kernels.dense.tpu import TpuCodedMatmul
from jaxllm_kernels.platform import chip_of
from jaxllm_kernels.topology import topology_devices

IN_GROUPS = CodeForm(codes="float8_e4m3fn", group=128)
TPU = TpuCodedMatmul(chip="v7x", interpret=True)


def relative_error(y, x, weight):
    exact = np.asarray(x, np.float64) @ np.asarray(values(weight), np.float64).T
    return np.linalg.norm(np.asarray(y, np.float64) - exact) / np.linalg.norm(exact)


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize(
    ("num_rows", "shape", "form", "dtype"),
    [
        # Blocks of outputs, of which the last is shorter.
        (5, (320, 384), IN_GROUPS, "bfloat16"),
        # Groups in a loop.
        (9, (96, 2048), IN_GROUPS, "bfloat16"),
        # Tiles of rows, and groups that are widened in two parts.
        (520, (96, 1280), CodeForm(codes="int8", group=640), "float32"),
        # XLA keeps the outputs last.
        (3, (384, 320), CodeForm(codes="int8", group=320, scale_dtype="bfloat16"), "bfloat16"),
    ],
)
def test_products_are_right(num_rows, shape, form, dtype):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((num_rows, shape[1])), dtype)
    weight = random_weight(random, shape, form)
    multiply = replace(TPU, block_bytes=128 * shape[1])
    y = jax.jit(multiply)(x, weight)
    assert y.dtype == jnp.float32 and y.shape == (num_rows, shape[0])
    assert relative_error(y, x, weight) < 1e-6


@pytest.mark.usefixtures("no_races")
def test_leading_axes_are_kept():
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((6, 256)), jnp.float32)
    weight = random_weight(random, (128, 256), IN_GROUPS)
    y = TPU(x.reshape(2, 3, 256), weight)
    np.testing.assert_array_equal(y.reshape(6, 128), TPU(x, weight))


@pytest.mark.parametrize(
    ("form", "shape", "why"),
    [
        (FORMS["float8"], (256, 256), "XLA needs no kernel where an output has one scale"),
        (FORMS["int8, groups of 16"], (256, 256), "groups of 16 inputs are no multiple of 128"),
        (FORMS["mxfp4"], (256, 256), "by those of 8 bits without offsets"),
        (IN_GROUPS, (256, 128 * 128), "not fewer than 128 groups of 128"),
        (CodeForm(codes="int8", group=1 << 22), (256, 1 << 23), "more on-chip memory"),
    ],
)
def test_what_is_left_to_xla(form, shape, why):
    with pytest.raises(ValueError, match=why):
        TPU.held(form, *shape)
    assert TPU.held(IN_GROUPS, 7168, 2048) == IN_GROUPS


# An instruction that only moves an array, but not one that loads it into VMEM in advance.
MOVES = re.compile(
    r"= \(?\w+\[([\d,]+)\](?!\S*S\(1\))[^=\n]*? (?:copy|copy-start|slice-start|transpose)\("
)


@pytest.mark.tpu_compile
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="NOTHING IS COMPILED FOR TPUS: libtpu is not installed (pip install 'jax[tpu]')",
)
@pytest.mark.parametrize(
    ("slice_name", "num_rows", "shape", "cut"),
    [
        # Of DeepSeek-V3: gate and up of its first layers, and an output projection.
        ("v7x-8", 2048, (36864, 7168), ("x", None)),
        ("v7x-8", 64, (7168, 16384), (None, "x")),
        pytest.param("v6e-8", 64, (36864, 7168), ("x", None), marks=pytest.mark.sweep),
        pytest.param("v5e-8", 1, (7168, 16384), (None, "x"), marks=pytest.mark.sweep),
        # Every device computes all of it.
        pytest.param("v7x-8", 64, (2112, 7168), (None, None), marks=pytest.mark.sweep),
    ],
)
def test_products_compile_without_copies_of_weights(slice_name, num_rows, shape, cut):
    devices = topology_devices(slice_name)
    mesh = Mesh(np.array(devices), ("x",))

    def array(*sizes, dtype, spec):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    num_groups = IN_GROUPS.num_groups(shape[1])
    weight = CodedWeight(
        codes=array(*shape, dtype=IN_GROUPS.codes, spec=P(*cut)),
        scales=array(shape[0], num_groups, dtype="float32", spec=P(*cut)),
        form=IN_GROUPS,
    )
    x = array(num_rows, shape[1], dtype=jnp.bfloat16, spec=P(None, cut[1]))
    multiply = TpuCodedMatmul(chip=chip_of(devices[0]).name, mesh=mesh, cut=cut)
    compiled = jax.jit(multiply).lower(x, weight).compile()
    hlo = compiled.as_text()
    moved = [math.prod(map(int, dims.split(","))) for dims in MOVES.findall(hlo)]
    assert all(size <= num_rows * max(shape) for size in moved)
    # The codes of a device, and what is smaller: their scales.
    assert all(size < math.prod(shape) // num_groups for size in moved if num_rows < 128)
    assert hlo.count("all-reduce(") + hlo.count("all-reduce-start(") == (cut[1] is not None)
