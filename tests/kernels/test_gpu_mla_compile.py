"""The GPU kernels for latent attention become good machine code, for an H200 that is not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxllm_kernels.mla.api import LatentConfig, get_latent_backend
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ragged_paged_attention.api import BatchLimits, RaggedBatch
from jaxllm_kernels.topology import topology_devices

from tests.kernels.sass import Kernels, matrix_shapes, why_no_assembler

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(bool(why_no_assembler()), reason=str(why_no_assembler())),
]

BACKEND = get_latent_backend("mosaic_sm90")
NUM_ROWS, NUM_TOKENS, NUM_BLOCKS = 64, 512, 4096


def _compile(config: LatentConfig, block_size: int, decode_only: bool):
    sharding = NamedSharding(Mesh(np.array(topology_devices("h200")), ("x",)), PartitionSpec())

    def abstract(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    limits = BatchLimits(
        num_tokens=NUM_TOKENS, num_rows=NUM_ROWS, max_blocks=128, block_size=block_size
    )
    BACKEND.check(config, limits, dtype="bfloat16", chip=CHIPS["h200"])
    num_tokens = NUM_ROWS if decode_only else NUM_TOKENS
    cache = BACKEND.cache_shape(
        config, num_blocks=NUM_BLOCKS, block_size=block_size, dtype="bfloat16"
    )
    batch = RaggedBatch(
        query_starts=abstract((NUM_ROWS + 1,)),
        context_lens=abstract((NUM_ROWS,)),
        block_tables=abstract((NUM_ROWS, limits.max_blocks)),
        num_decodes=abstract(()),
        num_short=abstract(()),
        block_size=block_size,
        decode_only=decode_only,
    )

    def step(q, rows, cache, batch):
        prepared = BACKEND.prepare(batch, (config,), num_tokens=num_tokens)
        return BACKEND.attend(q, rows, cache, batch, prepared, config=config)

    traced = jax.jit(step, donate_argnums=2).trace(
        abstract((num_tokens, config.num_heads, config.head_size), jnp.bfloat16),
        abstract((num_tokens, config.head_size), jnp.bfloat16),
        abstract(cache.shape, cache.dtype),
        batch,
    )
    return traced.lower(lowering_platforms=("cuda",)).compile(), cache


# DeepSeek-V3 over eight devices and on one, GLM-4.7-Flash, Mistral Small 4.
@pytest.mark.parametrize(
    ("num_heads", "latent_size", "block_size", "decode_only"),
    [
        (16, 512, 64, True),
        pytest.param(128, 512, 32, False, marks=pytest.mark.sweep),
        pytest.param(20, 512, 16, False, marks=pytest.mark.sweep),
        (32, 256, 128, False),
    ],
)
def test_latent_attention_compiles(
    compile_printing, num_heads, latent_size, block_size, decode_only
):
    config = LatentConfig(num_heads=num_heads, latent_size=latent_size, rope_size=64, scale=0.1)
    (compiled, cache), log = compile_printing(lambda: _compile(config, block_size, decode_only))
    hlo = compiled.as_text()
    kernels = Kernels.of(hlo, log)
    assert kernels.spills == {"latent_attention": 0, "merge_latents": 0, "place_latents": 0}
    assert not kernels.is_serialized
    kernels.assert_registers_suffice("latent_attention", 2)
    code = kernels.code["latent_attention"]
    assert matrix_shapes(code) == {"64x64x16", f"64x{latent_size // 2}x16"}
    # A block of rows is loaded once: no other copies than that, and that of queries.
    computing, producing = code.split("USETMAXREG.DEALLOC")
    assert computing.count("UTMALDG") == 1
    assert producing.count("UTMALDG") == max(64 // block_size, 1)
    cache_bytes = cache.size * cache.dtype.itemsize
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == cache_bytes
    # Most of it: parts of results, two for each thread block. Outputs and queries of some heads.
    assert memory.temp_size_in_bytes < 64 << 20
    assert " copy(" not in hlo
