"""The kernel that rotates heads and puts them where the other kernels want them, emulated."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.compat import gpu_interpret_params, why_no_mosaic_gpu
from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig

BLOCK_SIZE = 16
# Of three tokens and one of padding.
BLOCKS = np.array([1, 3, 3, np.iinfo(np.int32).max], np.int32)
POSITIONS = np.array([2, 15, 16, -1], np.int32)

no_mosaic = why_no_mosaic_gpu()


def rotated(x, cos, sin):
    """Heads [T, heads, H], one operation at a time in float32."""
    first, second = np.split(np.asarray(x).astype(np.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    both = [first * cos - second * sin, second * cos + first * sin]
    return np.concatenate(both, axis=-1).astype(x.dtype)


def assert_close(ours, expected):
    """The compiler may round a product and a sum once, not twice."""
    ours, expected = (np.asarray(x).astype(np.float32) for x in (ours, expected))
    np.testing.assert_allclose(ours, expected, rtol=2**-6, atol=2**-6)


# Groups are a tile, several, or not whole ones; tiles of keys and values have both, or two heads.
@pytest.mark.skipif(bool(no_mosaic), reason=f"the Mosaic GPU backend {no_mosaic}")
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "has_rope", "decode_only"),
    [
        (8, 2, 64, True, False),
        (8, 1, 128, True, False),
        (10, 2, 128, True, False),
        (9, 3, 64, False, False),
        (9, 3, 64, True, True),
        (4, 4, 256, True, False),
        (7, 1, 128, True, True),
        (16, 1, 128, False, True),
    ],
)
def test_heads_are_rotated_written_and_grouped(
    num_heads, num_kv_heads, head_size, has_rope, decode_only, capfd
):
    from jaxllm_kernels.ragged_paged_attention.gpu_place import can_place, place

    config = AttentionConfig(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, scale=0.1
    )
    assert can_place(config, head_size if has_rope else None)
    num_tokens, num_rows = 4, 4 if decode_only else 2
    rng = np.random.default_rng(0)
    heads = rng.normal(size=(num_tokens, num_heads + 2 * num_kv_heads, head_size))
    pages = rng.normal(size=(5, 2, num_kv_heads, BLOCK_SIZE, head_size))
    heads, pages = heads.astype(jnp.bfloat16), pages.astype(jnp.bfloat16)
    angles = rng.uniform(0, 7, (num_tokens, head_size // 2)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    placed = place(
        jnp.asarray(heads),
        (jnp.asarray(cos), jnp.asarray(sin)) if has_rope else None,
        jnp.asarray(pages),
        jnp.asarray(BLOCKS),
        jnp.asarray(POSITIONS),
        config=config,
        num_rows=num_rows,
        decode_only=decode_only,
        interpret=gpu_interpret_params(),
    )
    q, k, v = np.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)
    if has_rope:
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    group_size = num_heads // num_kv_heads
    groups = q[:num_rows].reshape(num_rows, num_kv_heads, group_size, head_size)
    assert_close(np.asarray(placed.grouped)[:, :, :group_size], groups)
    if decode_only:
        assert placed.queries is None
    else:
        assert_close(np.asarray(placed.queries)[:num_tokens], q)
    expected = pages.copy()
    for token in range(3):
        slot = POSITIONS[token] % BLOCK_SIZE
        expected[BLOCKS[token], :, :, slot] = k[token], v[token]
    assert_close(placed.cache, expected)
    # Values, and all that no token is written to, stay as they are.
    np.testing.assert_array_equal(np.asarray(placed.cache)[:, 1], expected[:, 1])
    assert (np.asarray(placed.out)[3] == 0).all()
    printed = capfd.readouterr()
    assert "RACE" not in printed.out + printed.err


@pytest.mark.skipif(bool(no_mosaic), reason=f"the Mosaic GPU backend {no_mosaic}")
@pytest.mark.parametrize(
    ("changes", "rotary_size"),
    [
        ({"head_size": 96}, 96),
        ({}, 64),  # of 128
        ({"kv_dtype": "int8"}, 128),
        ({"num_heads": 5, "num_kv_heads": 1}, 128),
    ],
)
def test_other_layers_are_left_to_xla(changes, rotary_size):
    from jaxllm_kernels.ragged_paged_attention.gpu_place import can_place

    options = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "scale": 0.1, **changes}
    assert not can_place(AttentionConfig(**options), rotary_size)
