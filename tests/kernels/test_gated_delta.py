"""The gated delta rule: every implementation computes every batch of every kind of layer."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.gated_delta.cases import LAYERS, TOLERANCE, Layer, draw, error, outputs
from jaxllm_kernels.gated_delta.native import NativeDelta
from jaxllm_kernels.gated_delta.reference import ReferenceDelta
from jaxllm_kernels.gated_delta.tpu import TpuDelta
from jaxllm_kernels.gated_delta.xla import XlaDelta
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch
from jaxllm_kernels.recurrent.cases import CASES
from jaxllm_kernels.recurrent.rows import prepare_rows
from jaxllm_kernels.recurrent.scan import AtOnce

from tests.kernels.mixed_rows import assert_as_xla

XLA = XlaDelta()
# Of the kernel in C++: what runs always, and layers that are like others.
ALWAYS = ("drafts", "many drafts", "decodes", "borders of tiles")
OTHERS = [name for name in LAYERS if name not in ("usual", "by channel")]


@pytest.fixture
def native(any_library):
    return NativeDelta.load(any_library)


# As on accelerators, but with fewer decodes and tiles at once than a step has.
BATCHED = XlaDelta(name="batched", at_once=AtOnce(2, 3))


# Each kind of row is in one of these.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ALWAYS else pytest.mark.sweep) for n in CASES]
)
def test_native_is_right(native, name):
    assert error(native, name, LAYERS["usual"]) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_xla_is_right(name):
    assert error(XLA, name, LAYERS["usual"]) < TOLERANCE


@pytest.mark.parametrize(
    "name", ["whole", "decodes", "mixed", "rows without tokens", "slots pass on", "drafts"]
)
def test_several_decodes_and_tiles_at_once_are_right(name):
    assert error(BATCHED, name, LAYERS["usual"]) < TOLERANCE


@pytest.mark.parametrize("layer", ["by channel", "the same key"])
def test_several_tiles_at_once_are_right_for_other_layers(layer):
    assert error(BATCHED, "mixed", LAYERS[layer]) < TOLERANCE


@pytest.mark.parametrize("layer", LAYERS)
def test_xla_is_right_for_other_layers(layer):
    assert error(XLA, "mixed", LAYERS[layer]) < TOLERANCE


@pytest.mark.parametrize(
    "layer",
    ["by channel", *(pytest.param(name, marks=pytest.mark.sweep) for name in OTHERS)],
)
def test_native_is_right_for_other_layers(native, layer):
    assert error(native, "drafts", dataclasses.replace(LAYERS[layer], value_size=200)) < TOLERANCE


@pytest.mark.parametrize("layer", ["usual", "by channel"])
def test_reference_is_right(layer):
    assert error(ReferenceDelta(), "mixed", LAYERS[layer]) < TOLERANCE


def test_operands_of_16_bits_are_computed_in_float32():
    assert error(XLA, "mixed", LAYERS["usual"], "bfloat16") < TOLERANCE


@pytest.mark.parametrize("kind", ["xla", "native"])
def test_a_request_alone_has_the_bits_that_it_has_in_a_crowd(kind, native):
    op = XLA if kind == "xla" else native
    crowd = CASES["mixed"]
    alone = dataclasses.replace(
        crowd, steps=tuple(tuple(row for row in step if row[0] == 1) for step in crowd.steps)
    )
    # Its row of one token is a decode in both.
    own, among_others = (outputs(op, case, LAYERS["usual"])[1] for case in (alone, crowd))
    np.testing.assert_array_equal(own, among_others)


@pytest.mark.parametrize("layer", ["usual", "by channel"])
def test_of_native_neither_a_cut_nor_a_crowd_changes_a_bit(native, layer):
    # Such heads are cut into parts if a row is alone.
    layer = dataclasses.replace(LAYERS[layer], value_size=200)
    whole = dataclasses.replace(CASES["mixed"], steps=(((0, 70),),))
    first, second = ((1, 30), (0, 3)), ((1, 1), (0, 1), (2, 5))
    cut = dataclasses.replace(whole, steps=(first, second, ((2, 4), (0, 66))))
    one, several = (outputs(native, case, layer)[0] for case in (whole, cut))
    np.testing.assert_array_equal(one, several)


def test_native_leaves_other_states_and_clears_other_outputs(native):
    layer = LAYERS["usual"]
    state_shape = (layer.num_heads, layer.key_size, layer.value_size)

    def run(op):
        return lambda operands, state, rows: op(*operands, state, rows)

    assert_as_xla(run(native), run(XLA), functools.partial(draw, layer), state_shape, 64)


def test_decodes_at_once_follow_the_chip():
    assert XLA.tuned_for(CHIPS["cpu"]).at_once == (1, 1)
    assert min(XLA.tuned_for(CHIPS["h200"]).at_once) > 1


@pytest.mark.parametrize("decode_only", [True, False])
def test_no_array_without_elements_is_around_kernels(decode_only):
    """In a shard_map the compiler of JAX 0.11.2 crashes on these, as a whole array's `at[:n].set`
    has one."""
    layer, num_rows, num_slots = Layer(key_size=128, value_size=128), 6, 4
    operands = draw(layer, np.random.default_rng(0), num_rows)
    batch = RaggedBatch(
        query_starts=jnp.arange(num_rows + 1, dtype=jnp.int32),
        context_lens=jnp.full(num_rows, 9),
        block_tables=jnp.zeros((num_rows, 0), jnp.int32),
        num_decodes=jnp.int32(num_rows),
        block_size=1,
        decode_only=decode_only,
    )
    slots = jnp.arange(num_rows)
    rows = prepare_rows(batch, slots, num_tokens=num_rows, num_slots=num_slots)
    state = jnp.zeros((num_slots, layer.num_heads, layer.key_size, layer.value_size))
    traced = jax.jit(TpuDelta(chip="v6e")).trace(*operands, state, rows)
    lowered = traced.lower(lowering_platforms=("tpu",)).as_text()
    # Types of index are the layouts of scalars.
    assert not re.search(r"tensor<0x(?!index)", lowered)
