"""The GPU kernels for latent attention: on a CPU in GPU-interpret mode, and on a Hopper GPU where
there is one. Interpret mode is slow, so there the cases are small ones of their own."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.compat import why_no_mosaic_gpu
from jaxllm_kernels.mla.api import LatentConfig, get_latent_backend
from jaxllm_kernels.mla.cases import CASES, TOLERANCES, Case, run_case
from jaxllm_kernels.mla.gpu import MosaicGpuLatentBackend
from jaxllm_kernels.mla.gpu_tiles import BLOCK, FRONT, Teams, cut_tiles
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ragged_paged_attention.api import BatchLimits, RaggedBatch

BACKEND = get_latent_backend("mosaic_sm90")
INTERPRETED = MosaicGpuLatentBackend(name="mosaic_sm90_interpreted", num_workers=4, interpret=True)

CONFIG = LatentConfig(num_heads=16, latent_size=512, rope_size=64, scale=0.1)
LIMITS = BatchLimits(num_tokens=2048, num_rows=64, max_blocks=128, block_size=64)

no_mosaic = why_no_mosaic_gpu()
interpreted = pytest.mark.skipif(bool(no_mosaic), reason=f"the Mosaic GPU kernels: {no_mosaic}")


@dataclass(frozen=True)
class OnlyWrites(MosaicGpuLatentBackend):
    """For histories, of which only the cache is used: XLA writes it."""

    def attend(self, q, rows, cache, batch, prepared, *, config):
        rows = jnp.pad(rows, ((0, 0), (0, cache.shape[2] - config.head_size)))
        slots = prepared.positions % batch.block_size
        return None, cache.at[prepared.write_blocks, slots].set(rows, mode="drop")


WRITER = OnlyWrites(name="only_writes", num_workers=4, interpret=True)


def assert_correct(backend, case: Case, dtype: str, capfd) -> None:
    history_backend = WRITER if backend is INTERPRETED else None
    result = run_case(backend, case, dtype, history_backend=history_backend)
    assert result.all_finite
    assert result.error < TOLERANCES[dtype]
    assert not (case.fewest_fresh and result.attends_fresh)
    assert_no_races(capfd)


def assert_no_races(capfd) -> None:
    """The interpreter prints those that it finds, and goes on."""
    printed = capfd.readouterr()
    assert "RACE" not in printed.out + printed.err


# Cases of one shape share a program: a tile is four tokens of 16 heads.
SHAPE = {"num_heads": 16, "latent_size": 128, "rope_size": 64, "num_rows": 6}
# A decode over three blocks of rows, one over a part of one, a chunk over history, a fresh one.
_MIXED = ((1, 140), (1, 5), (30, 61), (3, 3))


def small(name: str, rows: tuple[tuple[int, int], ...], **changes) -> Case:
    return Case(name=name, rows=rows, **{**SHAPE, **changes})


# Lines of padding beside a token's, rows that are filled up, pages of several blocks.
ODD_SIZES = small("odd_sizes", _MIXED, num_heads=5, rope_size=8, block_size=128, max_blocks=2)

SMALL_CASES = [
    small("mixed", _MIXED),
    small("all_padding", ()),
    small("short_rows", ((1, 20), (2, 2), (8, 133), (5, 150))),
    small("no_padding", ((1, 64), (1, 7), (1, 1), (30, 40), (1, 65), (30, 190))),
    small("rows_without_tokens", ((1, 9), (10, 30), (0, 0), (12, 12), (0, 0), (5, 100))),
    small("page_borders", ((1, 16), (1, 33), (16, 16), (16, 32), (8, 64), (5, 69))),
    # One row has more blocks than there are teams, so that every team has a part of it.
    small("a_long_row", ((1, 192),)),
    small("fresh_rows", ((1, 40), (20, 20), (15, 15), (16, 50)), fewest_fresh=16),
    small("decodes", ((1, 1), (1, 17), (1, 180)), num_tokens=6, decode_only=True),
    small("all_padding_decodes", (), num_tokens=6, decode_only=True),
    # Teams of two, whose tiles end in the middle of a token.
    small(
        "teams",
        ((1, 70), (5, 140), (2, 2)),
        num_heads=72,
        latent_size=256,
        num_tokens=8,
        num_rows=3,
    ),
]
SWEPT_CASES = [
    ODD_SIZES,
    small("float16", ((1, 70), (3, 5)), num_heads=8, num_tokens=4, num_rows=2, max_blocks=5),
]


@interpreted
@pytest.mark.parametrize(
    "case",
    [*SMALL_CASES, *(pytest.param(case, marks=pytest.mark.sweep) for case in SWEPT_CASES)],
    ids=lambda case: case.name,
)
def test_small_cases_are_right_and_without_races(case, capfd):
    assert_correct(INTERPRETED, case, "bfloat16", capfd)


@interpreted
def test_float16_is_right(capfd):
    assert_correct(INTERPRETED, ODD_SIZES, "float16", capfd)


@interpreted
def test_only_the_rows_of_the_step_are_written(capfd):
    config = LatentConfig(num_heads=8, latent_size=128, rope_size=64, scale=0.1)
    batch = RaggedBatch(
        query_starts=jnp.array([0, 1, 4], jnp.int32),
        context_lens=jnp.array([3, 17], jnp.int32),
        block_tables=jnp.array([[1, 99], [3, 2]], jnp.int32),
        num_decodes=jnp.int32(1),
        block_size=16,
        decode_only=False,
    )
    spec = INTERPRETED.cache_shape(config, num_blocks=5, block_size=16, dtype=jnp.bfloat16)
    before = np.random.default_rng(0).normal(size=spec.shape).astype(spec.dtype)
    q = jnp.ones((6, 8, 192), jnp.bfloat16)
    prepared = INTERPRETED.prepare(batch, (config,), num_tokens=6)
    out, after = INTERPRETED.attend(q, q[:, 0], jnp.asarray(before), batch, prepared, config=config)
    changed = (np.asarray(after) != before).any(axis=2)  # [blocks, tokens]
    written = np.zeros((5, 16), bool)
    written[1, 2] = True  # position 2 of row 0
    written[3, 14:] = written[2, 0] = True  # positions 14 to 16 of row 1
    np.testing.assert_array_equal(changed, written)
    np.testing.assert_array_equal(np.asarray(out[4:], np.float32), 0)  # padding
    assert_no_races(capfd)


def parts_of_tiles(batch: RaggedBatch, teams: Teams, num_tokens: int):
    """The tiles, and for each the blocks that teams have of it: (team, first block, last block)."""
    tiles = jax.tree.map(np.asarray, cut_tiles(batch, teams, num_tokens=num_tokens))
    parts = {}
    for team, (first, last) in enumerate(zip(tiles.first_tile, tiles.last_tile, strict=True)):
        for tile in range(first, last):
            begin = team * tiles.share[0] - tiles.start[tile] - FRONT
            end = min(begin + tiles.share[0], -(-tiles.end[tile] // BLOCK))
            parts.setdefault(tile, []).append((team, max(begin, 0), end))
    return tiles, parts


@pytest.mark.parametrize("num_workers", [1, 5, 132])
@pytest.mark.parametrize("num_heads", [5, 16, 128])
@pytest.mark.parametrize("decode_only", [True, False])
def test_teams_have_every_block_once(decode_only, num_heads, num_workers):
    rng = np.random.default_rng(num_heads + num_workers)
    lengths = np.ones(40, np.int64) if decode_only else rng.integers(0, 90, 40)
    lengths[33:] = 0
    contexts = np.where(lengths > 0, lengths + rng.integers(0, 3000, 40), 0)
    starts = np.concatenate([[0], lengths.cumsum()])
    batch = RaggedBatch(
        query_starts=jnp.asarray(starts, jnp.int32),
        context_lens=jnp.asarray(contexts, jnp.int32),
        block_tables=jnp.zeros((40, 50), jnp.int32),
        num_decodes=jnp.int32(33 if decode_only else 0),
        block_size=64,
        decode_only=decode_only,
    )
    teams = Teams.of(num_heads, num_workers)
    tiles, parts = parts_of_tiles(batch, teams, 40 if decode_only else 4000)
    lines, load = [], np.zeros(teams.number)
    for tile, of_tile in parts.items():
        row, line, end = tiles.row[tile], tiles.line[tile], tiles.end[tile]
        num_lines = tiles.num_lines[tile]
        lines += range(line, line + num_lines)
        token = (line + num_lines - 1) // teams.heads
        assert end == contexts[row] - (starts[row + 1] - 1 - token)
        # Parts follow each other, in consecutive teams, and none is empty.
        borders = [0, *(end for _, _, end in of_tile)]
        assert [begin for _, begin, _ in of_tile] == borders[:-1]
        assert borders[-1] == -(-end // BLOCK)
        assert all(np.diff(borders) > 0)
        first = of_tile[0][0]
        assert [team for team, _, _ in of_tile] == [*range(first, first + len(of_tile))]
        for team, begin, stop in of_tile:
            load[team] += stop - begin
    assert sorted(lines) == [*range(lengths.sum() * teams.heads)]
    mean = (load.sum() + FRONT * len(parts)) / teams.number
    assert load.max() <= tiles.share[0] < mean + 1


@interpreted
@pytest.mark.parametrize("chip", ["h100", "h200"])
@pytest.mark.parametrize("latent_size", [256, 512])
def test_hopper_is_served(chip, latent_size):
    config = dataclasses.replace(CONFIG, latent_size=latent_size)
    BACKEND.check(config, LIMITS, dtype=jnp.bfloat16, chip=CHIPS[chip])


@interpreted
@pytest.mark.parametrize(
    ("config", "limits", "dtype", "message"),
    [
        ({}, {}, "float32", "set --dtype bfloat16 or float16, or --attention-backend xla"),
        ({"latent_size": 192}, {}, "bfloat16", "a multiple of 128 .* not of 192; set --attention"),
        ({"latent_size": 640}, {}, "bfloat16", "up to 512, not of 640"),
        ({"rope_size": 128}, {}, "bfloat16", "up to 576 numbers .* not 640; set --attention"),
        ({}, {"block_size": 8}, "bfloat16", "set --block-size"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(config, limits, dtype, message):
    config, limits = dataclasses.replace(CONFIG, **config), dataclasses.replace(LIMITS, **limits)
    with pytest.raises(ValueError, match=message):
        BACKEND.check(config, limits, dtype=dtype, chip=CHIPS["h200"])


@pytest.mark.parametrize("chip", ["cpu", "v5e"])
def test_other_chips_are_refused(chip):
    with pytest.raises(ValueError, match=f"not on {chip}; set --attention-backend xla"):
        BACKEND.check(CONFIG, LIMITS, dtype=jnp.bfloat16, chip=CHIPS[chip])


@pytest.mark.skipif(not no_mosaic, reason="this JAX is new enough")
def test_an_older_jax_is_refused():
    with pytest.raises(ValueError, match="needs JAX 0.11.2 .* set --attention-backend xla"):
        BACKEND.check(CONFIG, LIMITS, dtype=jnp.bfloat16, chip=CHIPS["h200"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", [*CASES, *SMALL_CASES, *SWEPT_CASES], ids=lambda case: case.name)
def test_a_hopper_gpu_is_right(case, dtype, gpu, capfd):
    limits = BatchLimits(
        num_tokens=case.num_tokens,
        num_rows=case.num_rows,
        max_blocks=case.max_blocks,
        block_size=case.block_size,
    )
    try:
        BACKEND.check(case.config, limits, dtype=dtype, chip=gpu)
    except ValueError as refusal:
        pytest.skip(str(refusal))
    assert_correct(BACKEND, case, dtype, capfd)
