"""The TPU kernels pass the compilers of all chips, on a machine that has none of them.

libtpu compiles for a described topology. That proves that a program is legal, fits into the chip's
memories, updates the cache in place and needs no collectives; it proves nothing about numbers,
which test_tpu_attention.py does in an emulator, nor about time.
"""

import functools
import importlib.util
import itertools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxllm_kernels.platform import CHIPS, chip_of
from jaxllm_kernels.ragged_paged_attention.api import (
    AttentionConfig,
    BatchLimits,
    KVScales,
    RaggedBatch,
)
from jaxllm_kernels.ragged_paged_attention.tpu import TpuBackend
from jaxllm_kernels.ragged_paged_attention.tpu_sizes import smem_bytes
from jaxllm_kernels.topology import topology_devices

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="NOTHING IS COMPILED FOR TPUS: libtpu is not installed (pip install 'jax[tpu]')",
    ),
]


def sweep(*values):
    """A case that others cover together."""
    return pytest.param(*values, marks=pytest.mark.sweep)


# As a host with four or eight chips shows itself.
SLICES = {"v4": "v4-8", "v5e": "v5e-8", "v5p": "v5p-8", "v6e": "v6e-8", "v7x": "v7x-8"}
HEAD_SIZES = (64, 80, 96, 128, 256)


@pytest.fixture(scope="module")
def devices():
    """Devices of a chip's topology, by its name."""
    return functools.cache(lambda chip: topology_devices(SLICES[chip]))


class Program(NamedTuple):
    """What is compiled: two layers' attention of a step."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    decode_only: bool = False
    num_tokens: int = 256
    num_rows: int = 64
    max_blocks: int = 64
    block_size: int = 64
    sees_ahead: bool = False

    def compile(self, devices: list) -> tuple[jax.stages.Compiled, int]:
        """The program for these devices, and the bytes of a device's cache."""
        mesh = Mesh(np.array(devices), ("tp",))
        shards = len(devices)
        num_tokens = self.num_rows if self.decode_only else self.num_tokens
        config = AttentionConfig(
            num_heads=self.num_heads // shards,
            num_kv_heads=self.num_kv_heads // shards,
            head_size=self.head_size,
            scale=self.head_size**-0.5,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            kv_dtype=self.kv_dtype,
        )
        backend = TpuBackend(chip=chip_of(devices[0]).name)
        shard = backend.cache_shape(
            config, num_blocks=2048, block_size=self.block_size, dtype=self.dtype
        )

        def array(shape, dtype, *spec):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

        def attend(q, k, v, cache, batch, sinks, scales):
            prepared = backend.prepare(batch, (config,), num_tokens=num_tokens)
            return backend.attend(
                q, k, v, cache, batch, prepared, config=config, sinks=sinks, kv_scales=scales
            )

        heads, per_head = P(None, "tp"), P("tp")
        attend = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(heads, heads, heads, heads, P(), per_head, per_head),
            out_specs=(heads, heads),
            check_vma=False,
        )
        q, k, v = (
            array((num_tokens, n, self.head_size), self.dtype, None, "tp")
            for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        )
        blocks, kv_heads, *rest = shard.shape
        cache = array((blocks, kv_heads * shards, *rest), shard.dtype, None, "tp")
        batch = RaggedBatch(
            query_starts=array((self.num_rows + 1,), jnp.int32),
            context_lens=array((self.num_rows,), jnp.int32),
            block_tables=array((self.num_rows, self.max_blocks), jnp.int32),
            num_decodes=array((), jnp.int32),
            num_short=array((), jnp.int32),
            last_seen=array((num_tokens,), jnp.int32) if self.sees_ahead else None,
            block_size=self.block_size,
            decode_only=self.decode_only,
        )
        sinks = array((self.num_heads,), jnp.float32, "tp") if self.has_sinks else None
        scale = array((self.num_kv_heads,), jnp.float32, "tp")
        scales = None if self.kv_dtype is None else KVScales(scale, scale)
        step = jax.jit(attend, donate_argnums=3)
        # As plans compile.
        options = dict(chip_of(devices[0]).compiler_options)
        compiled = step.lower(q, k, v, cache, batch, sinks, scales).compile(options)
        return compiled, shard.size * shard.dtype.itemsize


# Type and shape of what an instruction moves; an asynchronous one has a tuple of results, the first
# of which is the array.
MOVES = re.compile(r"= \(?(\w+)\[([\d,]+)\][^=\n]*? (copy|copy-start|transpose)\(")


def copies(hlo: str, num_bytes: int) -> list[str]:
    """Instructions of a program that move arrays of at least that size."""
    sizes = {"bf16": 2, "f32": 4, "s8": 1, "f8e4m3fn": 1}
    return [
        match[0]
        for match in MOVES.finditer(hlo)
        if match[1] in sizes
        and sizes[match[1]] * math.prod(map(int, match[2].split(","))) >= num_bytes
    ]


@pytest.mark.parametrize(
    "line",
    [
        "%copy.1 = bf16[8,2,64]{2,1,0:T(8,128)(2,1)} copy(%p)",
        "%copy.1 = bf16[8,2,64] copy(%p)",
        "%copy-start.1 = (bf16[8,2,64]{2,1,0:T(8,128)(2,1)}, bf16[8,2,64]{2,1,0:T(8,128)(2,1)},"
        " u32[]{:S(2)}) copy-start(%p), cross_program_prefetch_index=0",
        "ROOT %transpose.1 = s8[64,8,4]{0,1,2:T(8,128)(4,1)} transpose(%p), dimensions={2,0,1}",
    ],
    ids=["copy", "without_layout", "asynchronous", "transpose"],
)
def test_what_moves_a_large_array_is_found(line):
    program = f"ENTRY %main () -> f32[] {{\n  {line}\n  %done = f32[] add(%a, %b)\n}}"
    assert len(copies(program, 2048)) == 1
    assert not copies(program, 2049)


def test_what_computes_is_not_taken_for_a_copy():
    line = '%a = f32[8,64]{1,0} fusion(%copy.1), kind=kLoop, metadata={op_name="the copy(x)"}'
    assert not copies(line, 1)


COLLECTIVES = re.compile(r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter")


def assert_compiles(program: Program, devices: list) -> str:
    """Returns the program as compiled."""
    compiled, cache_bytes = program.compile(devices)
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == cache_bytes
    hlo = compiled.as_text()
    assert not copies(hlo, cache_bytes)
    assert not COLLECTIVES.search(hlo)
    return hlo


def assert_decodes_are_put_beside_prefills_without_copying_these(hlo: str) -> None:
    """Of `Program()`, as compiled for v5e or v6e."""
    # An asynchronous copy is no copy for an update, but to another memory.
    copied = [dims for _, dims, opcode in MOVES.findall(hlo) if opcode == "copy"]
    assert copied, "this is not how the compiler writes copies"
    assert f"{Program().num_tokens},8,4,128" not in copied


# 128 is compiled for each chip with features below, and without by test_tpu_bundles.py.
@pytest.mark.parametrize(
    ("chip", "head_size"),
    [
        ("v4", 512),
        ("v7x", 512),
        *(
            sweep(chip, size)
            for chip in SLICES
            for size in (*HEAD_SIZES, 512)
            if (chip, size) not in (("v4", 512), ("v7x", 512))
        ),
    ],
)
def test_every_head_size_compiles_on_every_chip(chip, head_size, devices):
    assert_compiles(Program(head_size=head_size), devices(chip)[:1])


# The sizes go round, so that each chip meets two of them.
@pytest.mark.parametrize(
    ("chip", "head_size"),
    [
        (chip, size) if (row + column) % 3 == 0 else sweep(chip, size)
        for row, chip in enumerate(SLICES)
        for column, size in enumerate((*HEAD_SIZES, 512))
    ],
)
def test_decodes_of_every_head_size_compile_on_every_chip(chip, head_size, devices):
    assert_compiles(Program(head_size=head_size, decode_only=True), devices(chip)[:1])


# As with speculation: most rows are short.
EVERYTHING = {
    "num_heads": 28,
    "num_kv_heads": 4,
    "num_tokens": 512,
    "num_rows": 64,
    "block_size": 32,
    "kv_dtype": "int8",
    "sliding_window": 1000,
    "soft_cap": 30.0,
    "has_sinks": True,
}


# What is a sweep here meets every chip with another head size below.
@pytest.mark.sweep
@pytest.mark.parametrize(
    "program",
    [
        Program(head_size=256, dtype="float32"),
        Program(head_size=64, kv_dtype="int8"),
        Program(kv_dtype="float8_e4m3fn"),
        Program(num_heads=28, num_kv_heads=4, sliding_window=1000, soft_cap=30.0, has_sinks=True),
        Program(**EVERYTHING | {"num_heads": 32, "num_kv_heads": 8}),
    ],
    ids=["float32", "int8_kv", "fp8_kv", "window_cap_sinks_gqa_7", "everything"],
)
@pytest.mark.parametrize("chip", SLICES)
def test_every_feature_compiles_on_every_chip(chip, program, devices):
    assert_compiles(program, devices(chip)[:1])


FEATURES = {
    "decode_only": {"decode_only": True},
    "float32": {"dtype": "float32"},
    "int8_kv": {"kv_dtype": "int8"},
    "fp8_kv": {"kv_dtype": "float8_e4m3fn"},
    "window_cap_sinks": {"sliding_window": 1000, "soft_cap": 30.0, "has_sinks": True},
    "everything": EVERYTHING,
}
# The chips go round, so that each meets every feature. What each has with another head size, or on
# several chips, or together with other features, is a sweep.
ALWAYS = ("float32", "everything")


def chip_for(row: int, column: int) -> str:
    return list(SLICES)[(row + column) % len(SLICES)]


def is_cut(feature: str, chip: str) -> bool:
    """Whether a feature is always compiled for a whole slice of these chips, and not for one."""
    return feature == ("float32" if chip in ("v4", "v5p", "v7x") else "fp8_kv")


GRID = [
    pytest.param(
        chip,
        size,
        feature,
        id=f"{size}-{feature}",
        marks=[] if feature in ALWAYS and not is_cut(feature, chip) else [pytest.mark.sweep],
    )
    for row, size in enumerate(HEAD_SIZES)
    for column, feature in enumerate(FEATURES)
    for chip in (chip_for(row, column),)
    if feature != "decode_only"
]


@pytest.mark.parametrize(("chip", "head_size", "feature"), GRID)
def test_every_feature_compiles_with_every_head_size(chip, head_size, feature, devices):
    program = Program(**{"head_size": head_size} | FEATURES[feature])
    assert_compiles(program, devices(chip)[:1])


# Of Gemma 3, 4B and 27B.
@pytest.mark.parametrize("chip", [sweep("v5e"), "v6e", sweep("v7x")])
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            Program(
                num_heads=8, num_kv_heads=4, head_size=256, sliding_window=1024, sees_ahead=True
            ),
            id="4b",
        ),
        pytest.param(
            Program(num_kv_heads=16, kv_dtype="int8", sees_ahead=True),
            id="27b_of_8_bits",
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_tokens_that_see_later_ones_compile(program, chip, devices):
    assert_compiles(program, devices(chip)[:1])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [sweep(6, 2), sweep(16, 16), sweep(8, 1), (128, 1), (71, 1), (40, 40)],
)
def test_every_ratio_of_heads_compiles(num_heads, num_kv_heads, devices):
    program = Program(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=80)
    assert_compiles(program, devices("v4")[:1])


@pytest.mark.parametrize(
    ("block_size", "num_tokens", "num_rows"),
    [
        (48, 16, 64),
        (256, 16, 16),
        # As `test_what_check_accepts_fits_into_scalar_memory`, which has more blocks.
        sweep(16, 2048, 256),
        sweep(256, 2048, 256),
        *(sweep(16, 16, rows) for rows in (16, 64)),
        *(sweep(48, *bucket) for bucket in ((16, 16), (2048, 256))),
        sweep(256, 16, 64),
    ],
)
def test_buckets_and_block_sizes_compile(block_size, num_tokens, num_rows, devices):
    program = Program(num_tokens=num_tokens, num_rows=num_rows, block_size=block_size)
    assert_compiles(program, devices("v5e")[:1])


# Whole slices are compiled with features below; these have none.
@pytest.mark.parametrize(
    ("decode_only", "chip", "shards"),
    [
        (False, "v4", 4),
        (False, "v5p", 4),
        *((True, chip, 8 if chip == "v7x" else 4) for chip in SLICES),
        *(sweep(False, chip, 8 if chip == "v7x" else 4) for chip in ("v5e", "v6e", "v7x")),
        *(sweep(only, chip, 8) for only in (True, False) for chip in ("v5e", "v6e")),
    ],
)
def test_shards_compile_without_collectives(decode_only, chip, shards, devices):
    assert_compiles(Program(decode_only=decode_only), devices(chip)[:shards])


# Devices of slices of four and of eight chips; a chip of v7x is two.
WHOLE_SLICES = {"v6e-4": 4, "v7x-8": 8, "v4-8": 4, "v5e-4": 4, "v5p-8": 4}
WHOLE_SLICES |= {"v4-16": 8, "v5e-8": 8, "v5p-16": 8, "v6e-8": 8, "v7x-16": 16}
# What the grid above has not on one chip is always compiled for a slice of these; decodes, which
# take a tenth of the time, for the others.
CUT = {
    (name, size, feature): None
    for row, size in enumerate(HEAD_SIZES)
    for column, feature in enumerate(FEATURES)
    for chip in (chip_for(row, column),)
    for number, name in enumerate(sorted(n for n in WHOLE_SLICES if n.startswith(f"{chip}-")))
    if (is_cut(feature, chip) and number == 0) or (feature == "decode_only" and number == 1)
}
# A sweep: the first two meet every head size but 128, the others two; features go round.
OTHERS = {
    (name, size, list(FEATURES)[(row + column) % 5]): None
    for row, name in enumerate(WHOLE_SLICES)
    for column, size in enumerate((64, 80, 96, 256))
    if row < 2 or (row + column) % 2
}
SHARDED = [
    pytest.param(
        *case, id="-".join(map(str, case)), marks=[] if case in CUT else [pytest.mark.sweep]
    )
    for case in CUT | OTHERS
]


@pytest.mark.parametrize(("name", "head_size", "feature"), SHARDED)
def test_whole_slices_compile_without_collectives(name, head_size, feature):
    shards = topology_devices(name)
    assert len(shards) == WHOLE_SLICES[name]
    program = Program(num_kv_heads=max(8, len(shards)), head_size=head_size, **FEATURES[feature])
    assert_compiles(program, shards)


@pytest.mark.parametrize("chip", ["v4", sweep("v7x")])
def test_what_check_accepts_fits_into_scalar_memory(chip, devices):
    rows, num_tokens = 256, 2048

    def estimate(max_blocks: int) -> int:
        limits = BatchLimits(
            num_tokens=num_tokens, num_rows=rows, max_blocks=max_blocks, block_size=16
        )
        return smem_bytes(limits)

    capacity = CHIPS[chip].smem_bytes
    most = next(n for n in itertools.count(1) if estimate(n + 1) > capacity)
    program = Program(
        num_tokens=num_tokens, num_rows=rows, max_blocks=most, block_size=16, has_sinks=True
    )
    assert_compiles(program, devices(chip)[:1])
    # And the estimate does not waste: a little more does not fit.
    with pytest.raises(jax.errors.JaxRuntimeError, match="smem"):
        program._replace(max_blocks=most * 33 // 32).compile(devices(chip)[:1])
