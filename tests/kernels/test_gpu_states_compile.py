"""The GPU kernels for decodes of recurrent layers become good machine code: compiled for an H200 on
a machine without a GPU. A state passes the registers once, and no array of states is copied."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxllm_kernels.gated_delta.gpu import MosaicDelta
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch
from jaxllm_kernels.recurrent.gpu_parts import columns_of_part, rows_of_part
from jaxllm_kernels.recurrent.rows import prepare_rows
from jaxllm_kernels.ssd.gpu import MosaicSsd
from jaxllm_kernels.topology import topology_devices

from tests.kernels.sass import Kernels, why_no_assembler

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(bool(why_no_assembler()), reason=str(why_no_assembler())),
]

CHIP = CHIPS["h200"]
NUM_ROWS, NUM_SLOTS = 64, 96
# With so many registers a thread, three thread blocks share a multiprocessor: while one computes,
# 64 KiB are on their way.
MOST_REGISTERS = 168
# Numbers of a part that the threads of a warpgroup load at once.
AT_ONCE = 4 * 128


def compile_op(op, operands, state, *, decode_only=True):
    """A layer, as a step calls it. `operands` and `state` are shapes and types."""
    mesh = Mesh(np.array(topology_devices("h200")), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def array(shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    num_tokens = operands[0][0][0]

    def run(operands, state, slots, query_starts, context_lens, num_decodes):
        batch = RaggedBatch(
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=jnp.zeros((NUM_ROWS, 0), jnp.int32),
            num_decodes=num_decodes,
            block_size=1,
            decode_only=decode_only,
        )
        rows = prepare_rows(batch, slots, num_tokens=num_tokens, num_slots=NUM_SLOTS)
        return op(*operands, state, rows)

    counts = (array(shape, jnp.int32) for shape in ((NUM_ROWS,), (NUM_ROWS + 1,), (NUM_ROWS,), ()))
    traced: Any = jax.jit(run, donate_argnums=1).trace(
        [array(*operand) for operand in operands], array(state), *counts
    )
    options = dict(CHIP.compiler_options)
    return traced.lower(lowering_platforms=("cuda",)).compile(options)


def operands_of_delta(num_tokens, num_key_heads, num_heads, size, *, by_channel=False):
    keys = (num_tokens, num_key_heads, size)
    decays = (num_tokens, num_heads, *((size,) if by_channel else ()))
    return (
        (keys,),
        (keys,),
        ((num_tokens, num_heads, size), jnp.bfloat16),
        (decays,),
        (decays[:2],),
    )


def assert_in_place(compiled, state):
    memory, shape = compiled.memory_analysis(), ",".join(map(str, state[1:]))
    assert memory.alias_size_in_bytes == 4 * np.prod(state)
    made = re.findall(rf"= f32\[\d+,{shape}\]\S* ([\w-]+)\(", compiled.as_text())
    assert not {"copy", "copy-start", "gather", "scatter", "fusion"} & set(made)


def assert_good_code(compiled, log, name):
    kernels = Kernels.of(compiled.as_text(), log)
    assert kernels.spills == {name: 0}
    assert kernels.registers[name] <= MOST_REGISTERS
    # What the assembler keeps in memory that is a thread's own.
    assert not re.search(r"\b(LDL|STL)\b", kernels.code[name])
    return kernels.code[name]


@pytest.mark.parametrize(
    ("num_key_heads", "num_heads", "size", "by_channel"),
    [
        (16, 32, 128, False),
        (32, 32, 128, True),
        pytest.param(2, 4, 128, False, marks=pytest.mark.sweep),
        pytest.param(4, 4, 64, False, marks=pytest.mark.sweep),
        pytest.param(4, 4, 256, True, marks=pytest.mark.sweep),
    ],
)
def test_a_decode_of_the_delta_rule(compile_printing, num_key_heads, num_heads, size, by_channel):
    operands = operands_of_delta(NUM_ROWS, num_key_heads, num_heads, size, by_channel=by_channel)
    state = (NUM_SLOTS, num_heads, size, size)
    op = MosaicDelta.tuned_for(CHIP)
    op.check(size, size)
    compiled, log = compile_printing(lambda: compile_op(op, operands, state))
    code = assert_good_code(compiled, log, "delta_decode")
    assert_in_place(compiled, state)
    # XLA's form has the states of 32 rows beside.
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * np.prod(state[1:])
    # A thread's numbers of a state, and of its rows keys, queries, and decays of channels.
    of_state = size * columns_of_part(size, size) // AT_ONCE
    of_rows = of_state // 4 * (3 if by_channel else 2)
    assert len(re.findall(r"\bLDG?\.E\.128\b", code)) == of_state + of_rows
    # A thread's numbers of a state, outputs, and outputs of rows that are skipped.
    assert len(re.findall(r"\bSTG?\.E\.128\b", code)) == of_state + 2


@pytest.mark.sweep
def test_decodes_of_the_delta_rule_beside_tiles(compile_printing):
    """Tiles are XLA's loop, which changes the kernel's states in place."""
    operands = operands_of_delta(512, 16, 32, 128)
    state = (NUM_SLOTS, 32, 128, 128)
    op = MosaicDelta.tuned_for(CHIP)
    compiled, log = compile_printing(lambda: compile_op(op, operands, state, decode_only=False))
    assert_good_code(compiled, log, "delta_decode")
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 4 * np.prod(state)
    made = re.findall(r"= f32\[96,32,128,128\]\S* ([\w-]+)\(", compiled.as_text())
    assert not {"copy", "copy-start", "gather", "scatter"} & set(made)


@pytest.mark.parametrize(
    ("num_groups", "num_heads", "head_size", "state_size"),
    [
        (8, 64, 64, 128),  # Nemotron 3 Nano
        pytest.param(1, 128, 64, 128, marks=pytest.mark.sweep),  # Granite 4.0 H Small
        pytest.param(1, 24, 64, 256, marks=pytest.mark.sweep),
        pytest.param(2, 4, 128, 128, marks=pytest.mark.sweep),
    ],
)
def test_a_decode_of_mamba2(compile_printing, num_groups, num_heads, head_size, state_size):
    of_states = (NUM_ROWS, num_groups, state_size), jnp.bfloat16
    operands = (
        ((NUM_ROWS, num_heads, head_size), jnp.bfloat16),
        of_states,
        of_states,
        ((NUM_ROWS, num_heads),),
        ((num_heads,),),
    )
    state = (NUM_SLOTS, num_heads, head_size, state_size)
    op = MosaicSsd.tuned_for(CHIP)
    op.check(head_size, state_size)
    compiled, log = compile_printing(lambda: compile_op(op, operands, state))
    code = assert_good_code(compiled, log, "ssd_decode")
    assert_in_place(compiled, state)
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * np.prod(state[1:])
    # A thread's numbers of a state; columns are in 16 bits, and inputs and outputs single numbers.
    of_state = rows_of_part(head_size, state_size) * state_size // AT_ONCE
    assert len(re.findall(r"\bLDG?\.E\.128\b", code)) == of_state
    assert len(re.findall(r"\bSTG?\.E\.128\b", code)) == of_state
