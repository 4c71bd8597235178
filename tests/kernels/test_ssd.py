"""The state space of Mamba2: every implementation computes every batch of every kind of layer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch
from jaxllm_kernels.recurrent.cases import CASES
from jaxllm_kernels.recurrent.rows import prepare_rows
from jaxllm_kernels.recurrent.scan import AtOnce
from jaxllm_kernels.ssd.cases import LAYERS, TOLERANCE, draw, error, outputs
from jaxllm_kernels.ssd.native import NativeSsd
from jaxllm_kernels.ssd.reference import ReferenceSsd
from jaxllm_kernels.ssd.xla import XlaSsd

from tests.kernels.mixed_rows import assert_as_xla

XLA = XlaSsd()
# What the kernel in C++ computes always: decodes, prompts and drafts, with rows and columns that
# fill no whole vectors.
ALWAYS = [("drafts", "odd sizes"), ("many drafts", "odd sizes"), ("borders of tiles", "usual")]
NATIVE = [
    *ALWAYS,
    *((name, "usual") for name in CASES if name != "borders of tiles"),
    *(("drafts", layer) for layer in LAYERS if layer not in ("usual", "odd sizes")),
]
# As on accelerators, but with fewer decodes and tiles at once than a step has.
BATCHED = XlaSsd(name="batched", at_once=AtOnce(2, 3))


@pytest.fixture
def native(any_library):
    return NativeSsd.load(any_library)


@pytest.mark.parametrize(
    ("name", "layer"),
    [pytest.param(*it, marks=[] if it in ALWAYS else pytest.mark.sweep) for it in NATIVE],
)
def test_native_is_right(native, name, layer):
    assert error(native, name, LAYERS[layer]) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_xla_is_right(name):
    assert error(XLA, name, LAYERS["usual"]) < TOLERANCE


@pytest.mark.parametrize(
    "name", ["whole", "decodes", "mixed", "rows without tokens", "slots pass on", "drafts"]
)
def test_several_decodes_and_tiles_at_once_are_right(name):
    assert error(BATCHED, name, LAYERS["usual"]) < TOLERANCE


@pytest.mark.parametrize("layer", LAYERS)
def test_xla_is_right_for_other_layers(layer):
    assert error(XLA, "mixed", LAYERS[layer]) < TOLERANCE


def test_reference_is_right():
    assert error(ReferenceSsd(), "mixed", LAYERS["usual"]) < TOLERANCE


def test_operands_of_16_bits_are_computed_in_float32():
    assert error(XLA, "mixed", LAYERS["usual"], "bfloat16") < TOLERANCE


@pytest.mark.parametrize("kind", ["xla", "native"])
def test_a_request_alone_has_the_bits_that_it_has_in_a_crowd(kind, library):
    op = XLA if kind == "xla" else NativeSsd.load(library)
    crowd = CASES["mixed"]
    alone = dataclasses.replace(
        crowd, steps=tuple(tuple(row for row in step if row[0] == 1) for step in crowd.steps)
    )
    # Its row of one token is a decode in both.
    own, among_others = (outputs(op, case, LAYERS["usual"])[1] for case in (alone, crowd))
    np.testing.assert_array_equal(own, among_others)


def test_of_native_neither_a_cut_nor_a_crowd_changes_a_bit(native):
    # Such heads are cut into parts if a row is alone.
    layer = dataclasses.replace(LAYERS["odd sizes"], head_size=90)
    whole = dataclasses.replace(CASES["mixed"], steps=(((0, 70),),))
    first, second = ((1, 30), (0, 3)), ((1, 1), (0, 1), (2, 5))
    cut = dataclasses.replace(whole, steps=(first, second, ((2, 4), (0, 66))))
    one, several = (outputs(native, case, layer)[0] for case in (whole, cut))
    np.testing.assert_array_equal(one, several)


def test_native_leaves_other_states_and_clears_other_outputs(native):
    layer = LAYERS["usual"]
    state_shape = (layer.num_heads, layer.head_size, layer.state_size)

    def run(op):
        return lambda operands, state, rows: op(*operands, layer.rate, state, rows)

    assert_as_xla(run(native), run(XLA), functools.partial(draw, layer), state_shape, 64)


def test_no_step_copies_the_states_of_all_slots():
    num_tokens, num_slots, heads, size, state_size = 128, 64, 8, 64, 128
    state = jax.ShapeDtypeStruct((num_slots, heads, size, state_size), jnp.float32)

    def run(x, b, c, step, rate, state, query_starts):
        batch = RaggedBatch(
            query_starts=query_starts,
            context_lens=jnp.diff(query_starts),
            block_tables=jnp.zeros((2, 0), jnp.int32),
            num_decodes=jnp.int32(1),
            block_size=1,
            decode_only=False,
        )
        rows = prepare_rows(batch, jnp.arange(2), num_tokens=num_tokens, num_slots=num_slots)
        return XLA(x, b, c, step, rate, state, rows)

    def floats(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    vectors = floats(num_tokens, 1, state_size)
    operands = (floats(num_tokens, heads, size), vectors, vectors, floats(num_tokens, heads))
    starts = jax.ShapeDtypeStruct((3,), jnp.int32)
    lowered = jax.jit(run, donate_argnums=5).lower(*operands, floats(heads), state, starts)
    analysis = lowered.compile().memory_analysis()
    assert analysis is not None and analysis.temp_size_in_bytes < state.size * 4


def test_decodes_at_once_follow_the_chip():
    assert XLA.tuned_for(CHIPS["cpu"]).at_once == (1, 1)
    assert min(XLA.tuned_for(CHIPS["h200"]).at_once) > 1
