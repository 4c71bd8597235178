"""The GPU kernels of recurrent layers become good machine code: compiled for an H200 on a machine
without a GPU. A state passes the registers once, and no array of states is copied."""

import contextlib
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxllm_kernels.gated_delta.gpu import MosaicDelta
from jaxllm_kernels.gated_delta.xla import XlaDelta
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch
from jaxllm_kernels.recurrent.gpu_parts import (
    columns_in_turn,
    columns_of_part,
    rows_in_turn,
    rows_of_part,
)
from jaxllm_kernels.recurrent.rows import prepare_rows, rows_of_drafts
from jaxllm_kernels.ssd.gpu import MosaicSsd
from jaxllm_kernels.ssd.xla import XlaSsd
from jaxllm_kernels.topology import topology_devices

from jaxllm.programs.launches import all_launches, by_name, in_command_buffer, read_listing
from tests.kernels.sass import Kernels, why_no_assembler

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(bool(why_no_assembler()), reason=str(why_no_assembler())),
]

CHIP = CHIPS["h200"]
NUM_ROWS, NUM_SLOTS = 64, 96
NUM_TOKENS = 2048  # of a step of rows of several tokens
NUM_DRAFTS = 4  # of each row that has drafts
# With so many registers a thread, three thread blocks share a multiprocessor: while one computes,
# 64 KiB are on their way.
MOST_REGISTERS = 168
# Of a kernel for rows of several tokens, by a thread's numbers of a state. With up to 32 of them,
# four thread blocks share a multiprocessor.
MOST_REGISTERS_IN_TURN = {24: 128, 32: 128, 64: MOST_REGISTERS}
# Launches of a layer with rows of several tokens, however many they are.
MOST_LAUNCHES = 10
# Numbers of a part that the threads of a warpgroup load at once.
AT_ONCE = 4 * 128


def compile_op(lowered, dump: Path | None = None):
    """Compile what `lower_op` or `lower_drafts` returned. `dump` gets XLA's listing of launches."""
    options = dict(CHIP.compiler_options)
    if dump is not None:
        options |= {"xla_dump_to": str(dump)}
    return lowered.compile(options)


def lower_op(op, operands, state, *, decode_only=True):
    """A layer, as a step calls it. `operands` and `state` are shapes and types."""
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

    return lower(run, operands, state, (NUM_ROWS,), (NUM_ROWS + 1,), (NUM_ROWS,), ())


def lower_drafts(op, operands, state):
    """A layer whose states go on over the drafts that are right."""

    def run(operands, state, slots, num_right):
        return op(*operands, state, rows_of_drafts(slots, num_right, NUM_DRAFTS))

    return lower(run, operands, state, (NUM_ROWS,), (NUM_ROWS,))


def lower(run, operands, state, *counts):
    mesh = Mesh(np.array(topology_devices("h200")), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def array(shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    traced: Any = jax.jit(run, donate_argnums=1).trace(
        [array(*operand) for operand in operands],
        array(state),
        *(array(shape, jnp.int32) for shape in counts),
    )
    return traced.lower(lowering_platforms=("cuda",))


def operands_of_delta(
    num_tokens, num_key_heads, num_heads, key_size, value_size=None, *, by_channel=False
):
    """Values are as large as keys, unless they have a size of their own."""
    keys = (num_tokens, num_key_heads, key_size)
    decays = (num_tokens, num_heads, *((key_size,) if by_channel else ()))
    return (
        (keys,),
        (keys,),
        ((num_tokens, num_heads, value_size or key_size), jnp.bfloat16),
        (decays,),
        (decays[:2],),
    )


def assert_in_place(compiled, state):
    memory, shape = compiled.memory_analysis(), ",".join(map(str, state[1:]))
    assert memory.alias_size_in_bytes == 4 * np.prod(state)
    made = re.findall(rf"= f32\[\d+,{shape}\]\S* ([\w-]+)\(", compiled.as_text())
    assert not {"copy", "copy-start", "gather", "scatter", "fusion"} & set(made)


def assert_good_code(compiled, log, most_registers):
    """The machine code of each kernel. `most_registers` names all kernels that the program has."""
    kernels = Kernels.of(compiled.as_text(), log)
    assert kernels.spills == dict.fromkeys(most_registers, 0)
    for name, most in most_registers.items():
        assert kernels.registers[name] <= most, name
        # What the assembler keeps in memory that is a thread's own.
        assert not re.search(r"\b(LDL|STL)\b", kernels.code[name]), name
    return kernels.code


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
    compiled, log = compile_printing(lambda: compile_op(lower_op(op, operands, state)))
    code = assert_good_code(compiled, log, {"delta_decode": MOST_REGISTERS})["delta_decode"]
    assert_in_place(compiled, state)
    # XLA's form has the states of 32 rows beside.
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * np.prod(state[1:])
    # A thread's numbers of a state, and of its rows keys, queries, and decays of channels.
    of_state = size * columns_of_part(size, size) // AT_ONCE
    of_rows = of_state // 4 * (3 if by_channel else 2)
    assert len(re.findall(r"\bLDG?\.E\.128\b", code)) == of_state + of_rows
    # A thread's numbers of a state, outputs, and outputs of rows that are skipped.
    assert len(re.findall(r"\bSTG?\.E\.128\b", code)) == of_state + 2


def operands_of_ssd(num_tokens, num_groups, num_heads, head_size, state_size):
    of_states = (num_tokens, num_groups, state_size), jnp.bfloat16
    heads = ((num_tokens, num_heads, head_size), jnp.bfloat16)
    return heads, of_states, of_states, ((num_tokens, num_heads),), ((num_heads,),)


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
    operands = operands_of_ssd(NUM_ROWS, num_groups, num_heads, head_size, state_size)
    state = (NUM_SLOTS, num_heads, head_size, state_size)
    op = MosaicSsd.tuned_for(CHIP)
    op.check(head_size, state_size)
    compiled, log = compile_printing(lambda: compile_op(lower_op(op, operands, state)))
    code = assert_good_code(compiled, log, {"ssd_decode": MOST_REGISTERS})["ssd_decode"]
    assert_in_place(compiled, state)
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * np.prod(state[1:])
    # A thread's numbers of a state; columns are in 16 bits, and inputs and outputs single numbers.
    of_state = rows_of_part(head_size, state_size) * state_size // AT_ONCE
    assert len(re.findall(r"\bLDG?\.E\.128\b", code)) == of_state
    assert len(re.findall(r"\bSTG?\.E\.128\b", code)) == of_state


@pytest.mark.parametrize(
    ("num_key_heads", "num_heads", "key_size", "value_size", "by_channel"),
    [
        (16, 32, 128, 128, False),
        (32, 32, 128, 128, True),
        (4, 4, 96, 192, False),
        pytest.param(2, 4, 128, 128, False, marks=pytest.mark.sweep),
        pytest.param(4, 4, 64, 64, False, marks=pytest.mark.sweep),
        pytest.param(4, 4, 256, 256, True, marks=pytest.mark.sweep),
    ],
)
def test_rows_of_several_tokens_of_the_delta_rule(
    compile_printing, num_key_heads, num_heads, key_size, value_size, by_channel, tmp_path
):
    operands = operands_of_delta(
        NUM_TOKENS, num_key_heads, num_heads, key_size, value_size, by_channel=by_channel
    )
    state = (NUM_SLOTS, num_heads, key_size, value_size)
    op = MosaicDelta.tuned_for(CHIP)
    op.check(key_size, value_size)
    compiled, log = compile_printing(
        lambda: compile_op(lower_op(op, operands, state, decode_only=False), tmp_path)
    )
    columns = columns_in_turn(key_size, value_size)
    numbers = key_size * columns
    code = assert_good_code(compiled, log, kernels_with("delta", numbers))["delta_rows"]
    assert_in_place(compiled, state)
    assert_few_launches(tmp_path)
    assert_moved_once(code, numbers, columns // 16)


@pytest.mark.parametrize(
    ("num_groups", "num_heads", "head_size", "state_size"),
    [
        (8, 64, 64, 128),
        pytest.param(1, 128, 64, 128, marks=pytest.mark.sweep),
        pytest.param(1, 24, 64, 256, marks=pytest.mark.sweep),
        pytest.param(2, 4, 128, 128, marks=pytest.mark.sweep),
    ],
)
def test_rows_of_several_tokens_of_mamba2(
    compile_printing, num_groups, num_heads, head_size, state_size, tmp_path
):
    operands = operands_of_ssd(NUM_TOKENS, num_groups, num_heads, head_size, state_size)
    state = (NUM_SLOTS, num_heads, head_size, state_size)
    op = MosaicSsd.tuned_for(CHIP)
    op.check(head_size, state_size)
    compiled, log = compile_printing(
        lambda: compile_op(lower_op(op, operands, state, decode_only=False), tmp_path)
    )
    numbers = rows_in_turn(head_size, state_size) * state_size
    code = assert_good_code(compiled, log, kernels_with("ssd", numbers))["ssd_rows"]
    assert_in_place(compiled, state)
    assert_few_launches(tmp_path)
    assert_moved_once(code, numbers, 4)


@pytest.mark.parametrize(
    ("name", "kind", "operands", "state", "numbers", "vector"),
    [
        (
            "delta",
            MosaicDelta,
            operands_of_delta(NUM_ROWS * NUM_DRAFTS, 16, 32, 128),
            *((NUM_SLOTS, 32, 128, 128), 128 * 32, 2),
        ),
        (
            "ssd",
            MosaicSsd,
            operands_of_ssd(NUM_ROWS * NUM_DRAFTS, 8, 64, 64, 128),
            *((NUM_SLOTS, 64, 64, 128), 32 * 128, 4),
        ),
    ],
)
def test_rows_with_drafts(compile_printing, name, kind, operands, state, numbers, vector, tmp_path):
    op = kind.tuned_for(CHIP)
    compiled, log = compile_printing(
        lambda: compile_op(lower_drafts(op, operands, state), tmp_path)
    )
    code = assert_good_code(compiled, log, kernels_with(name, numbers))[f"{name}_rows"]
    assert_in_place(compiled, state)
    assert_few_launches(tmp_path)
    assert_moved_once(code, numbers, vector, is_stored_at_a_token=True)


def kernels_with(name, numbers):
    """The kernels of a layer with rows of several tokens, with the most registers of each.
    `numbers` are those of a part."""
    most = MOST_REGISTERS_IN_TURN[numbers // 128]
    return {f"{name}_decode": MOST_REGISTERS, f"{name}_rows": most}


# Sizes along which sums go, and along which matrices are cut. No part has sums over more than 256.
SUMMED, CUT = range(32, 288, 32), (16, 32, 48, 64, 96, 128)


@pytest.mark.parametrize("key_size", SUMMED)
def test_sizes_of_the_delta_rule_that_pass_the_check_are_lowered(key_size):
    op = MosaicDelta.tuned_for(CHIP)
    for value_size in sizes_that_pass(lambda value_size: op.check(key_size, value_size)):
        state = (NUM_SLOTS, 2, key_size, value_size)
        for by_channel in (False, True):
            operands = operands_of_delta(
                NUM_ROWS, 1, 2, key_size, value_size, by_channel=by_channel
            )
            lower_op(op, operands, state, decode_only=False)


@pytest.mark.parametrize("state_size", SUMMED)
def test_sizes_of_mamba2_that_pass_the_check_are_lowered(state_size):
    op = MosaicSsd.tuned_for(CHIP)
    for head_size in sizes_that_pass(lambda head_size: op.check(head_size, state_size)):
        operands = operands_of_ssd(NUM_ROWS, 1, 2, head_size, state_size)
        lower_op(op, operands, (NUM_SLOTS, 2, head_size, state_size), decode_only=False)


def sizes_that_pass(check):
    passing = []
    for size in CUT:
        with contextlib.suppress(ValueError):
            check(size)
            passing.append(size)
    assert passing
    return passing


def assert_few_launches(dump):
    launches = [*all_launches(in_command_buffer(read_listing(dump)))]
    # No loop, whose launches would grow with the tokens.
    assert not {"kWhile", "kConditional"} & {launch.kind for launch in launches}
    assert len(launches) <= MOST_LAUNCHES, by_name(launches)


def assert_moved_once(code, num_numbers, vector, *, is_stored_at_a_token=False):
    """Each thread loads its numbers of the state in one place of the code, and stores them in one
    place: outside of the loop over tokens, unless the state of a token before the last is kept."""
    width = f".{32 * vector}" if vector > 1 else ""
    moves = num_numbers // 128 // vector
    loop = code_of_smallest_loop_with(code, "SHFL.BFLY")
    for name in ("LD", "ST"):
        pattern = rf"\b{name}G?\.E{re.escape(width)}\s+(?!64|128)"
        inside = len(re.findall(pattern, loop))
        outside = len(re.findall(pattern, code)) - inside
        if name == "ST" and is_stored_at_a_token:
            assert outside == 0
            assert inside in (moves, moves + 1)  # an output may be as wide
        else:
            assert outside == moves, name


def code_of_smallest_loop_with(code, instruction):
    """The machine code from a label to a branch back to it, of which the instruction is part."""
    loops = []
    for branch in re.finditer(r"\bBRA `\((\.L_x_\d+)\)", code):
        label = code.find(f"{branch[1]}:")
        if 0 <= label < branch.start() and instruction in code[label : branch.start()]:
            loops.append(code[label : branch.start()])
    return min(loops, key=len)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("op", "operands", "state", "most"),
    [
        (XlaDelta(), operands_of_delta(512, 16, 32, 128), (NUM_SLOTS, 32, 128, 128), 146),
        (XlaSsd(), operands_of_ssd(512, 8, 64, 64, 128), (NUM_SLOTS, 64, 64, 128), 79),
    ],
)
def test_tiles_by_xla_are_prepared_together(op, operands, state, most, tmp_path):
    """What heads of other sizes take: XLA's form. Its launches for eight tiles."""
    compile_op(lower_op(op.tuned_for(CHIP), operands, state, decode_only=False), tmp_path)
    loops = [x for x in all_launches(read_listing(tmp_path)) if x.kind == "kWhile"]
    inside = [[*all_launches(y for branch in x.branches for y in branch)] for x in loops]
    (of_eight,) = (launches for launches in inside if any(x in launches for x in loops))
    (of_tile,) = (launches for x, launches in zip(loops, inside, strict=True) if x in of_eight)
    assert len(of_eight) - len(of_tile) + 8 * len(of_tile) <= most
