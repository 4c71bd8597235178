"""Self-attention for Hopper GPUs becomes good machine code, and a layer copies no queries, keys or
values but to cut them out of their common projection."""

import importlib
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ragged_self_attention.api import SelfAttentionConfig
from jaxllm_kernels.ragged_self_attention.gpu import MosaicSelfAttention
from jaxllm_kernels.ragged_self_attention.gpu_tiles import choose_sizes
from jaxllm_kernels.topology import topology_devices

from tests.kernels.sass import Kernels, matrix_shapes, why_no_assembler

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(bool(why_no_assembler()), reason=str(why_no_assembler())),
]

CHIP = CHIPS["h200"]
NAME = "ragged_self_attention"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Instructions that a thread may take for a score of a block, with and without masks.
MOST_INSTRUCTIONS = 10, 7


class Model(NamedTuple):
    """The heads of a device, and the largest step."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    num_tokens: int
    reach: int | None = None


MODELS = {
    "MiniLM": Model(12, 12, 32, 4096),
    "bge-large": Model(16, 16, 64, 4096),
    "ModernBERT": Model(12, 12, 64, 8192, reach=64),
    "EmbeddingGemma": Model(3, 1, 256, 2048, reach=256),
    "a decoder's heads": Model(32, 8, 128, 8192),
    "a tower of 72": Model(16, 16, 72, 4096),
    "a tower of 80": Model(16, 16, 80, 4096),
    "odd tokens": Model(16, 16, 64, 4100),
    # Fewer than a copy of queries, or of keys, has.
    "few tokens": Model(12, 12, 32, 16),
}
ALWAYS = {"MiniLM", "few tokens", "EmbeddingGemma", "a decoder's heads", "a tower of 72"}


def compile_layer(model: Model, *, dtype="bfloat16", alone: bool = False) -> jax.stages.Compiled:
    """Projections of tokens, and attention between them; or attention alone."""
    mesh = Mesh(np.array(topology_devices("h200")), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    num_heads, num_kv_heads, size, num_tokens, reach = model
    attend = MosaicSelfAttention.tuned_for(CHIP)
    attend.check(head_size=size, dtype=dtype)
    config = SelfAttentionConfig(scale=size**-0.5, reach=reach)

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def run(x, w_qkv, w_out, query_starts):
        projected = jnp.einsum("td,fd->tf", x, w_qkv).reshape(num_tokens, -1, size)
        q, k, v = jnp.split(projected, (num_heads, num_heads + num_kv_heads), axis=1)
        out = attend(q, k, v, query_starts, config)
        return jnp.einsum("tf,df->td", out.reshape(num_tokens, -1), w_out)

    hidden_size = num_heads * size
    operands = [
        array(num_tokens, hidden_size),
        array((num_heads + 2 * num_kv_heads) * size, hidden_size),
        array(hidden_size, hidden_size),
    ]
    if alone:

        def run(q, k, v, query_starts):
            return attend(q, k, v, query_starts, config)

        operands = [array(num_tokens, n, size) for n in (num_heads, num_kv_heads, num_kv_heads)]
    traced = jax.jit(run).trace(*operands, array(65, dtype=jnp.int32))
    lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compile(dict(CHIP.compiler_options))


def assert_good(compile_printing, model: Model, dtype: str = "bfloat16") -> jax.stages.Compiled:
    compiled, log = compile_printing(lambda: compile_layer(model, dtype=dtype, alone=True))
    kernels = Kernels.of(compiled.as_text(), log)
    assert kernels.spills == {NAME: 0}
    assert not kernels.is_serialized
    kernels.assert_registers_suffice(NAME, 2)
    sizes = choose_sizes(model.head_size)
    # Of queries and keys, and of weights and values.
    expected = {f"64x{sizes.block_tokens}x16", f"64x{sizes.head_size}x16"}
    code = kernels.code[NAME]
    assert matrix_shapes(code) == expected
    computing, producing = code.split("USETMAXREG.DEALLOC")
    # Whole tiles are copied, in both directions, by the copy engine.
    assert "UTMASTG" in computing and "UTMALDG" in producing
    assert not re.search(r"\bST[GS]\b", producing)
    return compiled


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.sweep) for name in MODELS],
)
def test_models_compile(compile_printing, name):
    model = MODELS[name]
    compiled = assert_good(compile_printing, model)
    moved = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose|pad)\(", compiled.as_text())
    is_padded = model.head_size % 16 or model.num_tokens % 8
    least = model.num_tokens * model.num_kv_heads * model.head_size
    large = [dims for dims in moved if np.prod([*map(int, dims.split(","))]) >= least]
    assert bool(large) == bool(is_padded)
    if not is_padded:
        # What tiles and queries see.
        assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20


def test_scores_take_few_instructions(compile_printing, monkeypatch):
    model = MODELS["MiniLM"]
    _, log = compile_printing(lambda: compile_layer(model, alone=True))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    first, _, last = importlib.import_module("counted_sass").matrix_loops(log)
    assert first.issue == last.issue  # both have masks
    counted = importlib.import_module("self_attention_gpu")
    masked, whole = counted.instructions_of_score(log, model.head_size)
    assert masked <= MOST_INSTRUCTIONS[0]
    assert whole <= MOST_INSTRUCTIONS[1]


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("reach", [None, 128])
@pytest.mark.parametrize("head_size", [*range(16, 129, 16), 256])
def test_all_sizes_compile(compile_printing, head_size, reach, dtype):
    assert_good(compile_printing, Model(8, 2, head_size, 1024, reach), dtype)
