"""The GPU kernels become good machine code: compiled for an H200 on a machine without a GPU."""

import dataclasses
import importlib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxllm_kernels.experts.api import ExpertsConfig, ExpertWeights
from jaxllm_kernels.experts.gpu import MosaicExperts
from jaxllm_kernels.experts.gpu_tiles import most_tiles
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ragged_paged_attention.api import (
    AttentionConfig,
    BatchLimits,
    KVScales,
    RaggedBatch,
    get_backend,
)
from jaxllm_kernels.topology import topology_devices

from tests.kernels.sass import Kernels, matrix_shapes, why_no_assembler

BACKEND = get_backend("mosaic_sm90")
NUM_LAYERS = 2
NUM_BLOCKS = 4096
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# How many more instructions a block of 128 keys has with a mask than without, with those that zero
# the end of the values.
MOST_INSTRUCTIONS_OF_MASKS = 250


pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(bool(why_no_assembler()), reason=str(why_no_assembler())),
]


@dataclass(frozen=True)
class Compiled:
    """A step of attention layers."""

    hlo: str
    kernels: Kernels
    alias_bytes: int
    temp_bytes: int
    cache: jax.ShapeDtypeStruct


@pytest.fixture
def compile_step(compile_printing):
    """A function that compiles a step's attention for an H200."""

    def run(
        config: AttentionConfig,
        block_size: int,
        dtype="bfloat16",
        decode_only=False,
        of_heads=False,
        sees_ahead=False,
    ):
        key = (config, block_size, dtype, decode_only, of_heads, sees_ahead)
        if key in _COMPILED:
            return _COMPILED[key]
        limits = BatchLimits(num_tokens=512, num_rows=64, max_blocks=128, block_size=block_size)
        BACKEND.check(config, limits, dtype=dtype, chip=CHIPS["h200"])
        (compiled, cache), log = compile_printing(
            lambda: _compile(config, limits, dtype, decode_only, of_heads, sees_ahead)
        )
        hlo = compiled.as_text()
        memory = compiled.memory_analysis()
        assert memory is not None
        _COMPILED[key] = Compiled(
            hlo=hlo,
            kernels=Kernels.of(hlo, log),
            alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            cache=cache,
        )
        return _COMPILED[key]

    return run


# By the arguments of compile_step: some tests look at the same program.
_COMPILED: dict[tuple, Compiled] = {}


def _compile(
    config: AttentionConfig,
    limits: BatchLimits,
    dtype,
    decode_only: bool,
    of_heads: bool,
    sees_ahead: bool,
):
    """Compile a step. The layers get the heads as their projection leaves them, or arranged."""
    mesh = Mesh(np.array(topology_devices("h200")), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def abstract(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    num_rows = limits.num_rows
    num_tokens = num_rows if decode_only else limits.num_tokens
    cache = BACKEND.cache_shape(
        config, num_blocks=NUM_BLOCKS, block_size=limits.block_size, dtype=dtype
    )
    q = abstract((num_tokens, config.num_heads, config.head_size), dtype)
    k = abstract((num_tokens, config.num_kv_heads, config.head_size), dtype)
    batch = RaggedBatch(
        query_starts=abstract((num_rows + 1,)),
        context_lens=abstract((num_rows,)),
        block_tables=abstract((num_rows, limits.max_blocks)),
        num_decodes=abstract(()),
        num_short=abstract(()),
        last_seen=abstract((num_tokens,)) if sees_ahead else None,
        block_size=limits.block_size,
        decode_only=decode_only,
    )
    scales = None
    if config.kv_dtype is not None:
        scales = KVScales(*[abstract((config.num_kv_heads,), jnp.float32)] * 2)
    sinks = abstract((config.num_heads,), jnp.float32)

    rotary = [abstract((num_tokens, config.head_size // 2), jnp.float32)] * 2

    @jax.jit
    def layer_of_heads(heads, cache, batch, prepared, rotary):
        out, cache = BACKEND.attend_heads(heads, rotary, cache, batch, prepared, config=config)
        beside = heads[:, config.num_heads :]
        return jnp.concatenate([out, beside], axis=1), cache

    def step_of_heads(q, k, caches, batch, rotary):
        prepared = BACKEND.prepare(batch, (config,), num_tokens=num_tokens)
        heads, new = jnp.concatenate([q, k, k], axis=1), []
        for cache in caches:
            heads, cache = layer_of_heads(heads, cache, batch, prepared, rotary)
            new.append(cache)
        return heads, new

    @jax.jit
    def layer(q, k, cache, batch, prepared, sinks, scales):
        return BACKEND.attend(
            q, k, k, cache, batch, prepared, config=config, sinks=sinks, kv_scales=scales
        )

    def step(q, k, caches, batch, sinks, scales):
        prepared = BACKEND.prepare(batch, (config,), num_tokens=num_tokens)
        new = []
        for cache in caches:
            q, cache = layer(q, k, cache, batch, prepared, sinks, scales)
            new.append(cache)
        return q, new

    caches = [abstract(cache.shape, cache.dtype)] * NUM_LAYERS
    if of_heads:
        traced = jax.jit(step_of_heads, donate_argnums=2).trace(q, k, caches, batch, rotary)
    else:
        traced = jax.jit(step, donate_argnums=2).trace(q, k, caches, batch, sinks, scales)
    return traced.lower(lowering_platforms=("cuda",)).compile(), cache


def config_of(head_size: int, **changes) -> AttentionConfig:
    options = {"num_heads": 32, "num_kv_heads": 8, "scale": 0.1, **changes}
    return AttentionConfig(head_size=head_size, **options)


def assert_good(compiled: Compiled, names: set[str]) -> None:
    kernels = compiled.kernels
    assert set(kernels.spills) == names
    for name, num_computing in (("paged_decode", 1), ("paged_prefill", 2)):
        if name in names:
            kernels.assert_registers_suffice(name, num_computing)
    assert not any(kernels.spills.values()), kernels.spills
    assert not kernels.is_serialized
    # Hopper's matrix instruction and copy engine, in each kernel that reads keys and values.
    for name in names - {"merge_decode", "place_heads"}:
        assert "HGMMA" in kernels.code[name], name
        assert "UTMALDG" in kernels.code[name], name
    assert_caches_in_place(compiled)


def assert_caches_in_place(compiled: Compiled) -> None:
    cache_bytes = compiled.cache.size * compiled.cache.dtype.itemsize
    assert compiled.alias_bytes == NUM_LAYERS * cache_bytes
    assert compiled.temp_bytes < cache_bytes / 4
    shape = ",".join(map(str, compiled.cache.shape))
    copies = [line for line in compiled.hlo.splitlines() if re.search(r" copy(-start)?\(", line)]
    assert not [line for line in copies if f"[{shape}]" in line]


MIXED = {"paged_decode", "merge_decode", "paged_prefill"}
DECODE = {"paged_decode", "merge_decode"}

# Every head size with every block size. Always each of both with another, and each head size and
# type of cache with others, in one of the tests below: heads of 256 are with features there.
_FAST_SHAPES = {(64, 16), (80, 128), (96, 32), (128, 64)}
SHAPES = [
    pytest.param(*shape, marks=[] if shape in _FAST_SHAPES else pytest.mark.sweep)
    for shape in itertools.product((64, 80, 96, 128, 256), (16, 32, 64, 128))
]


@pytest.mark.parametrize(("head_size", "block_size"), SHAPES)
def test_shapes_compile(compile_step, head_size, block_size):
    assert_good(compile_step(config_of(head_size), block_size), MIXED)


_FAST_SHAPES_OF_8_BITS = {("int8", 80, 64), ("float8_e4m3fn", 96, 64)}
SHAPES_OF_8_BITS = [
    pytest.param(*shape, marks=[] if shape in _FAST_SHAPES_OF_8_BITS else pytest.mark.sweep)
    for shape in [
        *itertools.product(("int8", "float8_e4m3fn"), (64, 80, 96, 128), (64,)),
        # Where registers are scarce, all block sizes.
        *itertools.product(("int8", "float8_e4m3fn"), (256,), (16, 32, 64, 128)),
    ]
]


@pytest.mark.parametrize(("kv_dtype", "head_size", "block_size"), SHAPES_OF_8_BITS)
def test_caches_of_8_bits_compile(compile_step, kv_dtype, head_size, block_size):
    assert_good(compile_step(config_of(head_size, kv_dtype=kv_dtype), block_size), MIXED)


WINDOW_AND_CAP = {"sliding_window": 4096, "soft_cap": 50.0}
FEATURES = {
    "float16": (config_of(128), "float16"),
    "window": (config_of(128, sliding_window=4096), "bfloat16"),
    "window_and_cap": (config_of(256, **WINDOW_AND_CAP), "bfloat16"),
    "window_and_cap_of_8_bits": (config_of(256, **WINDOW_AND_CAP, kv_dtype="int8"), "bfloat16"),
    "group_of_8": (config_of(64, sliding_window=128, num_heads=64), "bfloat16"),
    "group_of_7": (config_of(128, num_heads=28, num_kv_heads=4), "bfloat16"),
    "group_of_16": (config_of(128, num_kv_heads=2), "bfloat16"),
    "group_of_32": (config_of(256, num_kv_heads=1), "bfloat16"),
    "float16_of_8_bits": (config_of(256, kv_dtype="float8_e4m3fn"), "float16"),
}
# Where registers are scarcest.
_FAST_FEATURES = {"window_and_cap_of_8_bits", "group_of_16", "group_of_32", "float16_of_8_bits"}


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        pytest.param(*case, id=name, marks=[] if name in _FAST_FEATURES else pytest.mark.sweep)
        for name, case in FEATURES.items()
    ],
)
def test_features_compile(compile_step, config, dtype):
    assert_good(compile_step(config, 64, dtype), MIXED)


def test_masks_of_a_prefill_take_few_instructions(compile_step, monkeypatch):
    code = compile_step(config_of(128), 64).kernels.code["paged_prefill"]
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    whole, masked = importlib.import_module("counted_sass").matrix_loops(code)
    # A comparison and a selection for each of a thread's 64 scores.
    assert masked.issue - whole.issue <= MOST_INSTRUCTIONS_OF_MASKS


def test_a_step_of_decodes_has_no_prefill_kernel(compile_step):
    compiled = compile_step(config_of(128), 64, decode_only=True)
    assert_good(compiled, DECODE)
    # A group of four is eight columns of the matrix instruction.
    assert matrix_shapes(compiled.kernels.code["paged_decode"]) == {"64x8x16"}


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        (config_of(128), {"64x8x16", "64x32x16"}),
        (
            config_of(128, num_heads=64, sliding_window=4096, soft_cap=50.0),
            {"64x8x16", "64x64x16"},
        ),
        # Two parts, of three and of two heads.
        (config_of(128, num_heads=40, kv_dtype="int8"), {"64x8x16", "64x24x16"}),
    ],
    ids=["group_of_4", "everything", "parts"],
)
def test_short_rows_have_columns_of_their_own(compile_step, config, shapes):
    compiled = compile_step(config, 64)
    assert_good(compiled, MIXED)
    assert matrix_shapes(compiled.kernels.code["paged_decode"]) == shapes


def test_a_producer_of_16_bits_only_copies(compile_step):
    """It writes nothing to the ring itself, so it never waits for a copy."""
    compiled = compile_step(config_of(128), 64)
    for kernel in ("paged_decode", "paged_prefill"):
        computing, producing = compiled.kernels.code[kernel].split("USETMAXREG.DEALLOC")
        assert "STSM" in computing
        assert "UTMALDG" in producing
        assert "STS" not in producing


# Of Gemma 3: with heads of 256 of 4B and 12B, and of 128 of 27B.
GEMMA_4B = config_of(256, num_heads=8, num_kv_heads=4, sliding_window=1024)
GEMMA_27B = config_of(128, num_kv_heads=16, sliding_window=1024)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=[] if name == "4b_of_8_bits" else pytest.mark.sweep)
        for name, config in {
            "4b": GEMMA_4B,
            "4b_full": dataclasses.replace(GEMMA_4B, sliding_window=None),
            # Where registers are scarcest.
            "4b_of_8_bits": dataclasses.replace(GEMMA_4B, kv_dtype="int8"),
            "4b_full_of_8_bits": dataclasses.replace(
                GEMMA_4B, sliding_window=None, kv_dtype="float8_e4m3fn"
            ),
            "27b": GEMMA_27B,
            "27b_full": dataclasses.replace(GEMMA_27B, sliding_window=None),
            "everything": config_of(256, **WINDOW_AND_CAP, num_kv_heads=1),
        }.items()
    ],
)
def test_tokens_that_see_later_ones_compile(compile_step, config):
    assert_good(compile_step(config, 64, sees_ahead=True), MIXED)


GROUP_OF_7 = {"num_heads": 7, "num_kv_heads": 1}


@pytest.mark.parametrize(
    ("head_size", "heads", "decode_only"),
    [
        (64, {}, False),
        (128, GROUP_OF_7, True),
        (256, {}, True),
        # Whole steps have these.
        pytest.param(128, {}, True, marks=pytest.mark.sweep),
        pytest.param(128, {}, False, marks=pytest.mark.sweep),
        pytest.param(64, {}, True, marks=pytest.mark.sweep),
        pytest.param(128, GROUP_OF_7, False, marks=pytest.mark.sweep),
        pytest.param(256, {}, False, marks=pytest.mark.sweep),
    ],
)
def test_heads_are_placed_in_one_launch(compile_step, head_size, heads, decode_only):
    config = config_of(head_size, **heads)
    compiled = compile_step(config, 64, decode_only=decode_only, of_heads=True)
    assert_good(compiled, (DECODE if decode_only else MIXED) | {"place_heads"})


@dataclass(frozen=True)
class Layer:
    """The experts of a model's layer."""

    num_experts: int
    num_choices: int
    hidden_size: int
    size: int
    config: ExpertsConfig = ExpertsConfig()
    has_bias: bool = False


LAYERS = {
    "Qwen3-30B-A3B": Layer(128, 8, 2048, 768),
    "Mixtral-8x7B": Layer(8, 2, 4096, 14336),
    "gpt-oss-20b": Layer(
        32, 4, 2880, 2880, ExpertsConfig(gate_slope=1.702, up_offset=1.0, limit=7.0), has_bias=True
    ),
    "Nemotron-3-Nano": Layer(128, 6, 2688, 1856, ExpertsConfig(is_gated=False)),
    # Both of its matrices have two halves of whole pieces.
    "Nemotron-3-Super": Layer(512, 22, 1024, 2688, ExpertsConfig(is_gated=False)),
}


def _compile_experts(layer: Layer, num_tokens: int):
    mesh = Mesh(np.array(topology_devices("h200")), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def abstract(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    experts, hidden_size, size = layer.num_experts, layer.hidden_size, layer.size
    halves = layer.config.num_halves
    weights = ExpertWeights(
        abstract(experts, halves, size, hidden_size),
        abstract(experts, hidden_size, size),
        abstract(experts, halves, size) if layer.has_bias else None,
        abstract(experts, hidden_size) if layer.has_bias else None,
    )
    op = MosaicExperts()
    op.check(size, hidden_size, "bfloat16", CHIPS["h200"])
    choices = (num_tokens, layer.num_choices)
    traced = jax.jit(lambda *operands: op(*operands, config=layer.config)).trace(
        abstract(num_tokens, hidden_size),
        abstract(*choices, dtype=jnp.int32),
        abstract(*choices, dtype=jnp.float32),
        weights,
    )
    return traced.lower(lowering_platforms=("cuda",)).compile()


# Tokens that share rows, a decode of tokens that are gathered, and a prefill: with the rows of a
# tile, and the compute warpgroups of both kernels.
@pytest.mark.parametrize(
    ("model", "num_tokens", "tile_rows", "num_groups"),
    [
        pytest.param("Qwen3-30B-A3B", 1, 8, 1, marks=pytest.mark.sweep),
        ("Qwen3-30B-A3B", 16, 16, 1),
        pytest.param("Qwen3-30B-A3B", 64, 8, 1, marks=pytest.mark.sweep),
        ("Qwen3-30B-A3B", 2048, 128, 2),
        pytest.param("Mixtral-8x7B", 64, 16, 1, marks=pytest.mark.sweep),
        ("Mixtral-8x7B", 256, 64, 2),
        ("gpt-oss-20b", 8, 8, 1),
        # 2880 has 45 pieces, which two warpgroups cannot share.
        pytest.param("gpt-oss-20b", 1024, 128, 1, marks=pytest.mark.sweep),
        # 1856 and half of 2688 are odd numbers of pieces.
        ("Nemotron-3-Nano", 64, 8, 1),
        pytest.param("Nemotron-3-Nano", 2048, 128, 1, marks=pytest.mark.sweep),
        pytest.param("Nemotron-3-Super", 64, 8, 1, marks=pytest.mark.sweep),
    ],
)
def test_experts_compile(compile_printing, model, num_tokens, tile_rows, num_groups):
    layer = LAYERS[model]
    compiled, log = compile_printing(lambda: _compile_experts(layer, num_tokens))
    hlo = compiled.as_text()
    kernels = Kernels.of(hlo, log)
    first = "experts_gate_up" if layer.config.is_gated else "experts_up"
    assert kernels.spills == {first: 0, "experts_down": 0}
    assert not kernels.is_serialized
    for name, instructions in kernels.code.items():
        assert matrix_shapes(instructions) == {f"64x{tile_rows}x16"}
        assert "UTMALDG" in instructions and "UTMASTG" in instructions
        # A stage's products are waited for while the next one's run.
        assert "gsb0, 0x0" in instructions and re.search(r"gsb0, 0x[12]", instructions)
        kernels.assert_registers_suffice(name, num_groups)
    # No weights are copied: only rows and what experts make of them are in memory.
    num_rows = tile_rows * most_tiles(num_tokens * layer.num_choices, layer.num_experts, tile_rows)
    row_bytes = (2 + 4) * layer.hidden_size + 2 * layer.size
    assert compiled.memory_analysis().temp_size_in_bytes <= num_rows * (row_bytes + 64) + (1 << 20)
    assert not re.search(r"= (bf16|f32)\S* (copy|transpose)\(", hlo)
