"""The TPU kernels of latent attention pass the compilers of chips that are not there."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxllm_kernels.mla.api import LatentConfig
from jaxllm_kernels.mla.tpu import TpuLatentBackend
from jaxllm_kernels.platform import chip_of
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch
from jaxllm_kernels.topology import topology_devices

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="NOTHING IS COMPILED FOR TPUS: libtpu is not installed (pip install 'jax[tpu]')",
    ),
]
NUM_ROWS, MAX_BLOCKS, BLOCK_SIZE = 64, 64, 64


def compile_latents(
    device,
    *,
    num_heads: int,
    decode_only: bool,
    latent_size: int = 512,
    dtype: str = "bfloat16",
) -> tuple[jax.stages.Compiled, int]:
    """One layer's attention of a step, and the bytes of its cache."""
    mesh = Mesh(np.array([device]), ("tp",))
    num_tokens = NUM_ROWS if decode_only else 256
    config = LatentConfig(num_heads=num_heads, latent_size=latent_size, rope_size=64, scale=0.1)
    backend = TpuLatentBackend(chip=chip_of(device).name)

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    batch = RaggedBatch(
        query_starts=array((NUM_ROWS + 1,), jnp.int32),
        context_lens=array((NUM_ROWS,), jnp.int32),
        block_tables=array((NUM_ROWS, MAX_BLOCKS), jnp.int32),
        num_decodes=array((), jnp.int32),
        num_short=array((), jnp.int32),
        block_size=BLOCK_SIZE,
        decode_only=decode_only,
    )
    spec = backend.cache_shape(config, num_blocks=2048, block_size=BLOCK_SIZE, dtype=dtype)

    def attend(q, rows, cache, batch):
        prepared = backend.prepare(batch, (config,), num_tokens=num_tokens)
        return backend.attend(q, rows, cache, batch, prepared, config=config)

    attend = jax.shard_map(
        attend, mesh=mesh, in_specs=(P(),) * 4, out_specs=(P(), P()), check_vma=False
    )
    lowered = jax.jit(attend, donate_argnums=2).lower(
        array((num_tokens, num_heads, config.head_size), dtype),
        array((num_tokens, config.head_size), dtype),
        array(spec.shape, spec.dtype),
        batch,
    )
    return lowered.compile(), spec.size * spec.dtype.itemsize


def sweep(*values):
    """A program that others cover together."""
    return pytest.param(*values, marks=pytest.mark.sweep)


@pytest.mark.parametrize(
    ("slice_name", "num_heads", "options"),
    [
        ("v6e-1", 128, {}),
        # As Mistral Small 4, on a chip with two cores.
        ("v4-8", 32, {"latent_size": 256}),
        # test_tpu_bundles.py compiles both kinds of steps for v5e, v6e and v7x.
        sweep("v5e-1", 20, {}),
        sweep("v7x-8", 16, {"decode_only": True}),
        sweep("v4-8", 16, {"decode_only": True}),
        sweep("v5p-8", 64, {}),
        sweep("v5e-1", 128, {"decode_only": True}),
        sweep("v6e-1", 5, {"dtype": "float32"}),
        sweep("v7x-8", 128, {}),
        sweep("v7x-8", 2, {}),
    ],
)
def test_kernels_compile_and_update_the_cache_in_place(slice_name, num_heads, options):
    options = {"decode_only": False} | options
    device = topology_devices(slice_name)[0]
    compiled, cache_bytes = compile_latents(device, num_heads=num_heads, **options)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == cache_bytes
    # Queries and outputs in the kernels' layouts, padded; no copy of the cache.
    assert memory.temp_size_in_bytes < cache_bytes // 2
