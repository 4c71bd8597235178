"""Self-attention on Hopper GPUs, emulated on a CPU: results, races, and what tiles see."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jaxllm_kernels.compat import why_no_mosaic_gpu
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ragged_self_attention.api import SelfAttentionConfig
from jaxllm_kernels.ragged_self_attention.cases import CASES, TOLERANCES, Case, error
from jaxllm_kernels.ragged_self_attention.gpu import MosaicSelfAttention
from jaxllm_kernels.ragged_self_attention.gpu_tiles import (
    ALIGNMENT,
    GROUP_TOKENS,
    TILE_TOKENS,
    Sizes,
    choose_sizes,
    cut_tiles,
)

no_mosaic = why_no_mosaic_gpu()
needs_mosaic = pytest.mark.skipif(bool(no_mosaic), reason=f"JAX for Mosaic GPU kernels {no_mosaic}")

# Fewer workers than there are items, each of which then has several.
OP = MosaicSelfAttention(num_workers=3, interpret=True)
LENGTHS = (200, 1, 90, 130)
HEADS = {
    "MiniLM": {"num_heads": 2, "num_kv_heads": 2, "head_size": 32},
    "no whole matrix instructions": {"num_heads": 2, "num_kv_heads": 2, "head_size": 72},
    "narrow tiles": {"num_heads": 2, "num_kv_heads": 1, "head_size": 80},
    "grouped": {"num_heads": 4, "num_kv_heads": 2, "head_size": 128},
    "large": {"num_heads": 3, "num_kv_heads": 1, "head_size": 256},
}
ALWAYS = {"longer than a tile", "no even number of tokens", "nothing but padding", "a reach"}
ALWAYS |= {"causal", "rows left out"}
SUPPORTED = [name for name, case in CASES.items() if case.value_size is None]


@pytest.fixture(autouse=True)
def no_races(capfd):
    yield
    printed = capfd.readouterr()
    assert "RACE" not in printed.out + printed.err


@needs_mosaic
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.sweep) for name in SUPPORTED],
)
def test_cases(name):
    assert error(OP, CASES[name], "bfloat16") < TOLERANCES["bfloat16"]


@needs_mosaic
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("grouped", "large") else pytest.mark.sweep)
        for name in HEADS
    ],
)
def test_heads(name):
    case = Case(lengths=LENGTHS, num_tokens=424, **HEADS[name])
    assert error(OP, case, "bfloat16") < TOLERANCES["bfloat16"]


@needs_mosaic
def test_float16_and_blocks_that_are_seen_completely():
    # More workers than items. Of the third tile both warpgroups have whole blocks, and masked ones.
    op = MosaicSelfAttention(num_workers=20, interpret=True)
    case = Case(lengths=(600, 40), num_tokens=640, num_heads=2, num_kv_heads=2, head_size=32)
    assert error(op, case, "float16") < TOLERANCES["bfloat16"] / 8


@needs_mosaic
def test_keys_that_no_tile_sees_are_not_computed():
    # Where the kernel read a block that no query of its tile sees, the number would spread.
    random = np.random.default_rng(4)
    q, k, v = (jnp.asarray(random.normal(size=(512, 1, 64)), jnp.bfloat16) for _ in range(3))
    starts = jnp.asarray([0, 128, 256, 384, 512], jnp.int32)
    v = v.at[256:384].set(jnp.nan)
    out = np.asarray(OP(q, k, v, starts, SelfAttentionConfig(scale=0.1)), np.float32)
    assert np.isnan(out[256:384]).all()
    assert np.isfinite(out[:256]).all() and np.isfinite(out[384:]).all()


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), max_size=6),
    num_more=st.integers(0, 200),
    reach=st.sampled_from([None, 1, 64, 100]),
    block_tokens=st.sampled_from([64, 128]),
)
@example(lengths=[700, 60], num_more=0, reach=None, block_tokens=128)
def test_tiles_have_the_blocks_that_their_queries_see(lengths, num_more, reach, block_tokens):
    starts = np.cumsum([0, *lengths, *[0] * (7 - len(lengths))]).astype(np.int32)
    num_tokens = max(int(starts[-1]) + num_more, 1)
    tiles = cut_tiles(
        jnp.asarray(starts),
        None,
        num_tokens,
        SelfAttentionConfig(scale=1.0, reach=reach),
        block_tokens,
    )
    tiles = type(tiles)(*(np.asarray(x) for x in tiles))
    places = np.arange(len(tiles.first))
    rows = np.searchsorted(starts[1:], places, side="right")
    sees = (rows[:, None] == rows) & (places < starts[-1])[:, None]
    if reach is not None:
        sees &= abs(places[:, None] - places) <= reach
    assert sorted(tiles.token) == list(range(0, len(places), TILE_TOKENS))
    assert list(tiles.num_blocks) == sorted(tiles.num_blocks, reverse=True)
    for tile, (token, start) in enumerate(zip(tiles.token, tiles.start, strict=True)):
        assert start % ALIGNMENT == 0
        of_tile = sees[token : token + TILE_TOKENS].any(axis=0)
        expected = 0 if not of_tile.any() else of_tile.nonzero()[0][[0, -1]] @ [-1, 1] + 1
        assert expected <= tiles.num_blocks[tile] * block_tokens
        assert tiles.num_blocks[tile] * block_tokens < expected + ALIGNMENT + block_tokens
        for group in range(2):
            begin, whole, masked, stop = (
                int(x[tile, group]) for x in (tiles.begin, tiles.whole, tiles.masked, tiles.stop)
            )
            assert 0 <= begin <= whole <= masked <= stop <= tiles.num_blocks[tile]
            first = token + group * GROUP_TOKENS
            seen = sees[first : first + GROUP_TOKENS, start:]
            for block in range(tiles.num_blocks[tile]):
                of_block = seen[:, block * block_tokens : (block + 1) * block_tokens]
                assert (begin <= block < stop) == of_block.any()
                is_whole = of_block.shape[1] == block_tokens and of_block.all()
                assert (whole <= block < masked) == is_whole


def test_sizes():
    assert choose_sizes(32) == Sizes(32, 128, 4, 2)
    assert choose_sizes(72) == Sizes(80, 128, 4, 2)
    assert choose_sizes(128) == Sizes(128, 128, 2, 2)
    assert choose_sizes(256) == Sizes(256, 64, 2, 1)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"dtype": "float32"}, "it computes in 16 bits, not in float32"),
        ({"head_size": 192}, "heads of 192 are neither of 256 nor up to 128"),
        ({"head_size": 512}, "heads of 512 are neither of 256 nor up to 128"),
    ],
)
def test_what_it_does_not_compute_is_refused(changed, why):
    asked = {"head_size": 64, "dtype": "bfloat16"}
    OP.check(**asked)
    with pytest.raises(ValueError, match=why):
        OP.check(**asked | changed)


def test_other_chips_are_refused():
    with pytest.raises(ValueError, match="it runs on Hopper GPUs .* not on v6e"):
        MosaicSelfAttention.tuned_for(CHIPS["v6e"])


@needs_mosaic
def test_a_hopper_gpu_is_served():
    assert MosaicSelfAttention.tuned_for(CHIPS["h100"]) == MosaicSelfAttention()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CASES, *HEADS])
def test_a_hopper_gpu_is_right(name, gpu):
    case = CASES.get(name) or Case(lengths=LENGTHS, num_tokens=424, **HEADS[name])
    assert error(MosaicSelfAttention.tuned_for(gpu), case, "bfloat16") < TOLERANCES["bfloat16"]
