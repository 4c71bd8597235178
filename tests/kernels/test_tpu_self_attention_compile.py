"""Self-attention passes the TPU compilers, and a layer copies no queries, keys or values but to cut
them out of their common projection."""

import importlib.util
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxllm_kernels.platform import CHIPS, chip_of
from jaxllm_kernels.ragged_self_attention.api import SelfAttentionConfig
from jaxllm_kernels.ragged_self_attention.tpu import TpuSelfAttention
from jaxllm_kernels.ragged_self_attention.tpu_sizes import Heads, choose_sizes
from jaxllm_kernels.topology import topology_devices

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="NOTHING IS COMPILED FOR TPUS: libtpu is not installed (pip install 'jax[tpu]')",
    ),
]

SLICES = {"v4": "v4-8", "v5e": "v5e-8", "v6e": "v6e-8", "v7x": "v7x-8"}


class Model(NamedTuple):
    """The heads of a device, and the largest step."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    num_tokens: int
    reach: int | None = None


MODELS = {
    "MiniLM": Model(12, 12, 32, 4096),
    "MiniLM on 2": Model(6, 6, 32, 4096),
    "bge-large": Model(16, 16, 64, 4096),
    "ModernBERT": Model(12, 12, 64, 8192, reach=64),
    "EmbeddingGemma": Model(3, 1, 256, 2048, reach=256),
    "a decoder's heads": Model(32, 8, 128, 8192),
    "a tower of 72": Model(16, 16, 72, 4096),
    "a tower of 80": Model(16, 16, 80, 4096),
    "a large tower": Model(16, 16, 72, 1 << 14),
}


def fits(chip: str, model: Model, dtype: str) -> bool:
    """Whether a core of the chip has room for a head's keys and values."""
    heads = Heads(model.num_heads, model.num_kv_heads, model.head_size)
    try:
        choose_sizes(model.num_tokens, heads, dtype, CHIPS[chip])
    except ValueError:
        return False
    return True


def compile_layer(
    device, model: Model, *, dtype=jnp.bfloat16, op=None, alone: bool = False
) -> jax.stages.Compiled:
    """Projections of tokens, and attention between them; or attention alone."""
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    num_heads, num_kv_heads, size, num_tokens, reach = model
    attend = op or TpuSelfAttention(chip=chip_of(device).name)
    config = SelfAttentionConfig(scale=size**-0.5, reach=reach)

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def run(x, w_qkv, w_out, query_starts):
        projected = jnp.einsum("td,fd->tf", x, w_qkv).reshape(num_tokens, -1, size)
        q, k, v = jnp.split(projected, (num_heads, num_heads + num_kv_heads), axis=1)
        out = attend(q, k, v, query_starts, config)
        return jnp.einsum("tf,df->td", out.reshape(num_tokens, -1), w_out)

    hidden_size = num_heads * size
    operands = (
        array(num_tokens, hidden_size),
        array((num_heads + 2 * num_kv_heads) * size, hidden_size),
        array(hidden_size, hidden_size),
    )
    if alone:

        def run(q, k, v, query_starts):
            return attend(q, k, v, query_starts, config)

        operands = [array(num_tokens, n, size) for n in (num_heads, num_kv_heads, num_kv_heads)]
    lowered = jax.jit(run).lower(*operands, array(65, dtype=jnp.int32))
    return lowered.compile(dict(chip_of(device).compiler_options))


@pytest.mark.parametrize(
    ("chip", "name", "dtype"),
    [
        ("v6e", "MiniLM", "bfloat16"),
        ("v7x", "a tower of 72", "bfloat16"),
        *(
            pytest.param(chip, name, dtype, marks=pytest.mark.sweep)
            for chip in SLICES
            for name, model in MODELS.items()
            for dtype in ("bfloat16", "float32")
            if (chip, name, dtype) not in (
                ("v6e", "MiniLM", "bfloat16"), ("v7x", "a tower of 72", "bfloat16")
            )
            if fits(chip, model, dtype)
        ),
    ],
)  # fmt: skip
def test_a_layer_copies_nothing(chip, name, dtype):
    model = MODELS[name]
    compiled = compile_layer(topology_devices(SLICES[chip])[0], model, dtype=jnp.dtype(dtype))
    hlo = compiled.as_text()
    assert hlo.count('custom_call_target="tpu_custom_call"') == 1
    moved = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose|pad)\(", hlo)
    least = model.num_tokens * model.num_kv_heads * model.head_size
    assert not [dims for dims in moved if np.prod(list(map(int, dims.split(",")))) >= least]


# Heads of whole prompts of latent attention, sizes of keys and of values: of DeepSeek V3 over eight
# devices, and of GLM-4.7-Flash.
LATENTS = {"deepseek": (16, 192, 128), "glm": (20, 256, 256)}


@pytest.mark.parametrize(
    ("chip", "name"),
    [
        ("v6e", "deepseek"),
        ("v7x", "glm"),
        *(
            pytest.param(chip, name, marks=pytest.mark.sweep)
            for chip in SLICES
            for name in LATENTS
            if (chip, name) not in (("v6e", "deepseek"), ("v7x", "glm"))
        ),
    ],
)
def test_causal_rows_beside_others_compile(chip, name):
    num_heads, size, value_size = LATENTS[name]
    device = topology_devices(SLICES[chip])[0]
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    attend = TpuSelfAttention(chip=chip)
    config = SelfAttentionConfig(scale=size**-0.5, causal=True)
    num_tokens = 2048
    attend.check(
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=size,
        value_size=value_size,
        dtype=jnp.bfloat16,
    )

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def run(q, k, v, query_starts, query_ends):
        return attend(q, k, v, query_starts, config, query_ends)

    heads = [array(num_tokens, num_heads, n) for n in (size, size, value_size)]
    rows = array(65, dtype=jnp.int32), array(64, dtype=jnp.int32)
    compiled = jax.jit(run).lower(*heads, *rows).compile(dict(chip_of(device).compiler_options))
    (out,) = jax.tree.leaves(compiled.out_info)
    assert out.shape == (num_tokens, num_heads, value_size)
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1
