"""The experts by Mosaic GPU kernels: on a CPU in GPU-interpret mode, and on a Hopper GPU where
there is one. Interpret mode is slow, so there the experts are small."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.compat import why_no_mosaic_gpu
from jaxllm_kernels.experts.api import ExpertsConfig
from jaxllm_kernels.experts.cases import CASES, Case, operands, run_case
from jaxllm_kernels.experts.gpu import MosaicExperts
from jaxllm_kernels.experts.gpu_tiles import most_tiles, share_rows, sort_rows
from jaxllm_kernels.platform import CHIPS

EXPERTS = MosaicExperts()
INTERPRETED = MosaicExperts(name="mosaic_sm90_interpreted", num_workers=2, interpret=True)

no_mosaic = why_no_mosaic_gpu()
interpreted = pytest.mark.skipif(bool(no_mosaic), reason=f"the Mosaic GPU kernels: {no_mosaic}")


def small(case: Case, **changes) -> Case:
    return dataclasses.replace(case, **{"size": 64, "hidden_size": 64, **changes})


@pytest.fixture(autouse=True)
def no_races(capfd):
    """The interpreter prints those that it finds, and goes on."""
    yield
    printed = capfd.readouterr()
    assert "RACE" not in printed.out + printed.err


@functools.partial(jax.jit, static_argnames="config")
def _run(x, chosen, factors, weights, config):
    return INTERPRETED(x, chosen, factors, weights, config=config)


def run(case, x, chosen, factors, weights):
    return np.asarray(_run(x, chosen, factors, weights, config=case.config))


_FAST_CASES = {"clamped, with biases", "experts elsewhere, and padding", "without gates"}


@interpreted
@pytest.mark.parametrize(
    "name",
    [
        name if name in _FAST_CASES else pytest.param(name, marks=pytest.mark.sweep)
        for name in CASES
        if name not in ("wide", "all experts", "one choice")
    ],
)
def test_small_cases_are_right(name):
    run_case(INTERPRETED, small(CASES[name]), "bfloat16")


@interpreted
@pytest.mark.parametrize(
    "changes",
    [
        # Both halves of down at a time, several pieces of inputs, more items than workers.
        pytest.param({"num_tokens": 3, "size": 192, "hidden_size": 256}, marks=pytest.mark.sweep),
        # The same of up alone.
        pytest.param(
            {
                "num_tokens": 3,
                "size": 256,
                "config": ExpertsConfig(is_gated=False),
                "has_bias": True,
            },
            marks=pytest.mark.sweep,
        ),
        # Two compute warpgroups.
        {"num_tokens": 60, "num_experts": 2, "size": 128, "hidden_size": 256},
        # A tile of more rows than are stored at a time.
        {"num_tokens": 130, "num_experts": 2, "num_choices": 1, "has_bias": True},
        # More tokens than are compared with each other.
        pytest.param(
            {"num_tokens": 150, "num_experts": 40, "num_choices": 1}, marks=pytest.mark.sweep
        ),
    ],
    ids=["blocks", "halves_of_up", "warpgroups", "large_tiles", "groups"],
)
def test_shapes_are_right(changes):
    run_case(INTERPRETED, small(CASES["even"], **{"num_choices": 2, **changes}), "bfloat16")


@interpreted
def test_float16_is_right():
    run_case(INTERPRETED, small(CASES["few tokens"]), "float16")


# Of three tokens rows are shared, of twenty gathered.
@interpreted
@pytest.mark.parametrize("num_tokens", [3, 20])
def test_a_token_does_not_depend_on_others(num_tokens):
    case = small(CASES["even"], num_tokens=num_tokens, num_choices=2)
    x, chosen, factors, weights = operands(case, "bfloat16")
    others = operands(case, "bfloat16", seed=1)
    assert (others[1] != chosen).any()
    y = run(case, x, chosen, factors, weights)
    kept = zip(others[:3], (x, chosen, factors), strict=True)
    x, chosen, factors = (new.at[0].set(old[0]) for new, old in kept)
    np.testing.assert_array_equal(run(case, x, chosen, factors, weights)[0], y[0])


@interpreted
@pytest.mark.parametrize("num_tokens", [pytest.param(3, marks=pytest.mark.sweep), 20])
def test_neither_order_nor_what_is_not_chosen_matters(num_tokens):
    case = small(CASES["one expert has all tokens, one has none"], num_tokens=num_tokens)
    x, chosen, factors, weights = operands(case, "bfloat16")
    y = run(case, x, chosen, factors, weights)
    spoilt = jax.tree.map(lambda array: array.at[-1].set(jnp.nan), weights)
    np.testing.assert_array_equal(run(case, x, chosen[:, ::-1], factors[:, ::-1], spoilt), y)


@interpreted
@pytest.mark.parametrize("num_tokens", [3, pytest.param(20, marks=pytest.mark.sweep)])
def test_what_is_not_a_number_stays_with_its_token(num_tokens):
    case = small(CASES["even"], num_tokens=num_tokens)
    x, chosen, factors, weights = operands(case, "bfloat16")
    y = run(case, x, chosen, factors, weights)
    spoilt = run(case, x.at[1].set(jnp.nan), chosen, factors, weights)
    assert np.isnan(spoilt[1]).all()
    others = np.arange(num_tokens) != 1
    np.testing.assert_array_equal(spoilt[others], y[others])


def routed(num_tokens: int, num_choices: int, num_experts: int) -> np.ndarray:
    """Choices of which a third are no experts here."""
    random = np.random.default_rng(num_tokens)
    numbers = np.arange(-(num_experts // 4), num_experts + num_experts // 4)
    rows = [random.permutation(numbers)[:num_choices] for _ in range(num_tokens)]
    return np.stack(rows).astype(np.int32)


@pytest.mark.parametrize("shape", [(1, 3, 8), (5, 2, 4), (16, 4, 32)])
def test_tokens_that_share_rows_have_a_tile_for_each_expert(shape):
    chosen, num_experts = routed(*shape), shape[2]
    share = jax.jit(share_rows, static_argnums=(1, 2))
    tiles = jax.tree.map(np.asarray, share(jnp.asarray(chosen), num_experts, 16))
    listed = tiles.experts[: tiles.ends[-1]]
    here = [expert for expert in listed if 0 <= expert < num_experts]
    assert sorted(here) == sorted({e for e in chosen.flat if 0 <= e < num_experts})
    assert shape[0] == 1 or len(here) == len(listed)
    for (token, choice), expert in np.ndenumerate(chosen):
        if 0 <= expert < num_experts:
            row = tiles.rows[token, choice]
            assert tiles.experts[row // 16] == expert and row % 16 == token


@pytest.mark.parametrize("shape", [(1, 2, 4), (20, 3, 6), (40, 2, 64), (300, 4, 16), (2000, 2, 8)])
def test_sorted_rows_are_in_tiles_of_their_experts(shape):
    chosen, num_experts, tile_rows = routed(*shape), shape[2], 8
    sort = jax.jit(sort_rows, static_argnums=(1, 2))
    tiles = jax.tree.map(np.asarray, sort(jnp.asarray(chosen), num_experts, tile_rows))
    is_here = (chosen >= 0) & (chosen < num_experts)
    rows = tiles.rows[is_here]
    assert len(set(rows)) == len(rows)
    np.testing.assert_array_equal(tiles.experts[rows // tile_rows], chosen[is_here])
    np.testing.assert_array_equal(tiles.choices[rows], np.flatnonzero(is_here))
    counts = np.bincount(chosen[is_here], minlength=num_experts)
    assert tiles.ends[-1] == np.sum(-(-counts // tile_rows))
    assert tiles.ends[-1] <= len(tiles.experts) == most_tiles(chosen.size, num_experts, tile_rows)
    assert len(tiles.choices) == len(tiles.experts) * tile_rows


def test_every_routing_fits():
    """Choices in as many tiles as possible: one more than whole tiles for each expert."""
    chosen = np.concatenate([np.full(9, expert) for expert in range(5)])[:, None]
    tiles = jax.jit(sort_rows, static_argnums=(1, 2))(jnp.asarray(chosen, jnp.int32), 5, 8)
    assert int(tiles.ends[-1]) == most_tiles(45, 5, 8) == 10


@interpreted
@pytest.mark.parametrize(
    ("size", "hidden_size", "dtype", "message"),
    [
        (360, 2880, "bfloat16", "the size of an expert on a device, 360, is not a multiple of 64"),
        (768, 1000, "bfloat16", "hidden_size on a device, 1000, is not a multiple of 64"),
        (768, 2048, "float32", "it computes in 16 bits, not in float32"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(size, hidden_size, dtype, message):
    EXPERTS.check(2880, 2880, "bfloat16", CHIPS["h200"])
    with pytest.raises(ValueError, match=message):
        EXPERTS.check(size, hidden_size, dtype, CHIPS["h200"])


@pytest.mark.parametrize(
    "chip",
    [CHIPS["v6e"], dataclasses.replace(CHIPS["h200"], name="b200", compute_capability=(10, 0))],
    ids=lambda chip: chip.name,
)
def test_other_chips_are_refused(chip):
    with pytest.raises(ValueError, match=f"Hopper GPUs .* not on {chip.name}"):
        EXPERTS.check(768, 2048, "bfloat16", chip)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_a_hopper_gpu_is_right(name, dtype, gpu):
    case = CASES[name]
    size, hidden_size = (-(-n // 64) * 64 for n in (case.size, case.hidden_size))
    try:
        EXPERTS.check(size, hidden_size, dtype, gpu)
    except ValueError as refusal:
        pytest.skip(str(refusal))
    run_case(EXPERTS, small(case, size=size, hidden_size=hidden_size), dtype)
