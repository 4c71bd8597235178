"""The kernel that places heads becomes good machine code where nothing is rotated, for an H200 that
is not there. Rotated heads are compiled with the attention that follows (`test_gpu_compile.py`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig
from jaxllm_kernels.topology import topology_devices

from tests.kernels.sass import Kernels, why_no_assembler

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(bool(why_no_assembler()), reason=str(why_no_assembler())),
]

NUM_ROWS, NUM_TOKENS = 64, 512


def _compile(config: AttentionConfig, decode_only: bool):
    from jaxllm_kernels.ragged_paged_attention.gpu_place import can_place, place

    sharding = NamedSharding(Mesh(np.array(topology_devices("h200")), ("x",)), PartitionSpec())

    def abstract(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    assert can_place(config, None)
    num_tokens = NUM_ROWS if decode_only else NUM_TOKENS
    num_heads = config.num_heads + 2 * config.num_kv_heads
    cache = abstract((1024, 2, config.num_kv_heads, 64, config.head_size), jnp.bfloat16)

    def step(heads, cache, blocks, positions):
        return place(
            heads,
            None,
            cache,
            blocks,
            positions,
            config=config,
            num_rows=NUM_ROWS,
            decode_only=decode_only,
            interpret=False,
        )

    traced = jax.jit(step, donate_argnums=1).trace(
        abstract((num_tokens, num_heads, config.head_size), jnp.bfloat16),
        cache,
        abstract((num_tokens,)),
        abstract((num_tokens,)),
    )
    return traced.lower(lowering_platforms=("cuda",)).compile(), cache


# The last tile of keys has values, too, unless the kv heads are a multiple of four.
@pytest.mark.parametrize("decode_only", [True, False], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size"),
    [
        (32, 2, 128),  # Nemotron 3 Nano
        (16, 1, 128),  # the same on each of two devices
        pytest.param(32, 8, 128, marks=pytest.mark.sweep),  # Granite 4.0 H Small
        pytest.param(24, 6, 128, marks=pytest.mark.sweep),
        pytest.param(9, 3, 64, marks=pytest.mark.sweep),
        pytest.param(8, 2, 256, marks=pytest.mark.sweep),
    ],
)
def test_heads_without_a_rotation_are_placed(
    compile_printing, num_heads, num_kv_heads, head_size, decode_only
):
    config = AttentionConfig(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, scale=0.1
    )
    (compiled, cache), log = compile_printing(lambda: _compile(config, decode_only))
    assert Kernels.of(compiled.as_text(), log).spills == {"place_heads": 0}
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == cache.size * cache.dtype.itemsize
    assert memory.temp_size_in_bytes < 1 << 20
