import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.compat import gpu_interpret_params, why_no_mosaic_gpu
from jaxllm_kernels.top_k_cut import reference
from jaxllm_kernels.top_k_cut.api import top_k_top_p_min_p_cut

ROWS = 16


@jax.jit
def mask_of_logits(logits, top_k, top_p, min_p):
    """The logits of what a row may sample, -inf for the rest."""
    largest = jnp.max(logits, axis=1, keepdims=True)
    p = jnp.exp(logits - jnp.where(jnp.isfinite(largest), largest, 0))
    lowest = top_k_top_p_min_p_cut(p, top_k, top_p, min_p)
    return jnp.where(p >= lowest[:, None], logits, -jnp.inf)


def reference_mask(logits, top_k, top_p, min_p):
    largest = logits.max(axis=1, keepdims=True)
    p = np.exp(logits - np.where(np.isfinite(largest), largest, 0))
    lowest = reference.top_k_top_p_min_p_cut(p, top_k, top_p, min_p)
    return np.where(p >= lowest[:, None], logits, -np.inf)


@jax.jit
def mask_by_kernel(logits, top_k, top_p, min_p):
    """The same by the kernel for Hopper GPUs."""
    from jaxllm_kernels.top_k_cut import gpu

    largest = jnp.max(logits, axis=1, keepdims=True)
    p = jnp.exp(logits - jnp.where(jnp.isfinite(largest), largest, 0))
    lowest = gpu.top_k_top_p_min_p_cut(p, top_k, top_p, min_p)
    return jnp.where(p >= lowest[:, None], logits, -jnp.inf)


@pytest.fixture(
    params=[
        "here",
        pytest.param("gpu", marks=pytest.mark.gpu),
        pytest.param("kernel", marks=pytest.mark.gpu),
    ]
)
def mask(request):
    """The function, on what JAX computes on by itself; where it is asked for, that is a GPU."""
    if request.param != "here":
        request.getfixturevalue("gpu")
    return mask_by_kernel if request.param == "kernel" else mask_of_logits


def settings(rng, rows=ROWS):
    """Every combination of on and off, with random values where on."""
    on = np.arange(rows)
    top_k = np.where(on & 1, rng.integers(1, 60, rows), rng.integers(-1, 1, rows)).astype(np.int32)
    top_p = np.where(on & 2, rng.uniform(0.05, 0.999, rows), 1).astype(np.float32)
    min_p = np.where(on & 4, rng.uniform(0, 0.3, rows), 0).astype(np.float32)
    return top_k, top_p, min_p


def distinct_logits(rng, vocab_size, scale):
    """Rows whose probabilities are apart by more than rounding, in random order."""
    steps = rng.uniform(0.01, 1, (ROWS, vocab_size)) * scale / vocab_size
    return rng.permuted(np.cumsum(steps, axis=1), axis=1).astype(np.float32)


@pytest.mark.parametrize("vocab_size", [7, 128, 1000])
@pytest.mark.parametrize("scale", [1, 20, 80])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_sort(mask, vocab_size, scale, seed):
    rng = np.random.default_rng(seed)
    logits = distinct_logits(rng, vocab_size, scale)
    args = settings(rng)
    np.testing.assert_array_equal(mask(logits, *args), reference_mask(logits, *args))


@pytest.mark.parametrize("vocab_size", [32_000, 128_256, 256_000])
def test_equals_the_sort_on_the_vocabularies_of_models(mask, vocab_size):
    rng = np.random.default_rng(0)
    # Exact in float32, and apart by thousands of roundings of p.
    ranks = rng.permuted(np.tile(np.arange(vocab_size), (8, 1)), axis=1)
    logits = np.float32(2.0**-12) * ranks.astype(np.float32)
    top_k, top_p, min_p = settings(rng, rows=8)
    masked = np.asarray(mask(logits, top_k, top_p, min_p))
    expected = np.isfinite(reference_mask(logits, top_k, top_p, min_p))
    kept = np.isfinite(masked)
    np.testing.assert_array_equal(masked[kept], logits[kept])
    np.testing.assert_array_equal(kept[top_p == 1], expected[top_p == 1])
    # At the cut of a share, tokens weigh less than the rounding of a sum of so many.
    p = np.exp(logits.astype(np.float64) - logits.max())
    misplaced = (p * (kept != expected)).sum(axis=1) / (p * expected).sum(axis=1)
    assert misplaced.max() < 1e-5


@pytest.mark.parametrize("seed", range(3))
def test_ties_at_the_cut_are_kept(mask, seed):
    rng = np.random.default_rng(seed)
    logits = rng.integers(-3, 4, (ROWS, 128)).astype(np.float32)
    args = settings(rng)
    masked = np.asarray(mask(logits, *args))
    np.testing.assert_array_equal(masked, reference_mask(logits, *args))
    for row, kept in zip(logits, np.isfinite(masked), strict=True):
        assert not set(row[kept]) & set(row[~kept])


def test_a_zero_of_either_sign_is_no_min_p(mask):
    logits = distinct_logits(np.random.default_rng(0), 128, 20)
    top_k, top_p = np.full(ROWS, 9, np.int32), np.full(ROWS, 0.8, np.float32)
    np.testing.assert_array_equal(
        mask(logits, top_k, top_p, np.full(ROWS, -0.0, np.float32)),
        reference_mask(logits, top_k, top_p, np.zeros(ROWS, np.float32)),
    )


def test_a_tie_of_all_keeps_all(mask):
    logits = np.full((ROWS, 128), 2.5, np.float32)
    ones = np.ones(ROWS)
    masked = mask(logits, ones.astype(np.int32), np.float32(0.1 * ones), np.float32(ones))
    np.testing.assert_array_equal(masked, logits)


def test_disabled_values_change_nothing(mask):
    logits = np.random.default_rng(0).normal(0, 30, (ROWS, 128)).astype(np.float32)
    for k in (0, -1):
        off = (np.full(ROWS, k, np.int32), np.ones(ROWS, np.float32), np.zeros(ROWS, np.float32))
        np.testing.assert_array_equal(mask(logits, *off), logits)


def test_top_k_of_one_and_tiny_top_p_keep_the_best(mask):
    logits = distinct_logits(np.random.default_rng(0), 128, 20)
    off_p, off_m = np.ones(ROWS, np.float32), np.zeros(ROWS, np.float32)
    for k, p in ((1, off_p), (0, np.full(ROWS, 1e-30, np.float32))):
        masked = np.asarray(mask(logits, np.full(ROWS, k, np.int32), p, off_m))
        assert (np.isfinite(masked).sum(axis=1) == 1).all()
        np.testing.assert_array_equal(masked.argmax(axis=1), logits.argmax(axis=1))


def test_top_k_beyond_the_vocabulary_keeps_all(mask):
    logits = distinct_logits(np.random.default_rng(0), 128, 20)
    off_p, off_m = np.ones(ROWS, np.float32), np.zeros(ROWS, np.float32)
    for k in (128, 129, 2**31 - 1):
        np.testing.assert_array_equal(
            mask(logits, np.full(ROWS, k, np.int32), off_p, off_m), logits
        )


def test_top_p_is_a_share_of_what_top_k_left(mask):
    # 0.5, 0.25, 0.125, ... : of the best two, the first alone has the share 2/3.
    logits = np.tile(-np.arange(128) * np.log(2), (ROWS, 1)).astype(np.float32)
    off_m = np.zeros(ROWS, np.float32)

    def num_kept(k, p):
        args = (np.full(ROWS, k, np.int32), np.full(ROWS, p, np.float32), off_m)
        return np.isfinite(mask(logits, *args)).sum(axis=1)[0]

    assert num_kept(2, 0.6) == 1
    assert num_kept(0, 0.6) == 2
    assert num_kept(2, 0.7) == 2


def test_masked_logits_and_rows_without_any_are_left_alone(mask):
    rng = np.random.default_rng(0)
    logits = distinct_logits(rng, 128, 20)
    logits[:, ::3] = -np.inf
    logits[3] = -np.inf
    args = settings(rng)
    masked = np.asarray(mask(logits, *args))
    assert not np.isnan(masked).any()
    assert (masked[3] == -np.inf).all()
    np.testing.assert_array_equal(masked, reference_mask(logits, *args))


def test_a_row_does_not_depend_on_the_others(mask):
    rng = np.random.default_rng(0)
    logits = distinct_logits(rng, 1000, 20)
    args = settings(rng)
    together = np.asarray(mask(logits, *args))
    for row in range(ROWS):
        alone = [np.repeat(x[row : row + 1], ROWS, axis=0) for x in (logits, *args)]
        np.testing.assert_array_equal(mask(*alone)[0], together[row])


def test_a_cut_that_no_row_uses_is_not_searched():
    jaxpr = jax.make_jaxpr(top_k_top_p_min_p_cut)(
        *(jnp.zeros(shape, dtype) for shape, dtype in
          (((2, 8), jnp.float32), ((2,), jnp.int32), ((2,), jnp.float32), ((2,), jnp.float32)))
    )  # fmt: skip
    outermost = [equation.primitive.name for equation in jaxpr.eqns]
    assert outermost.count("cond") == 2 and "while" not in outermost


@pytest.mark.skipif(bool(why_no_mosaic_gpu()), reason="this JAX has no Mosaic GPU kernels")
@pytest.mark.parametrize(
    ("vocab_size", "rows"), [(1000, [0, 1, 2, 3, 5, 7]), (9000, [3])], ids=["short", "long"]
)
def test_the_kernel_for_hopper_equals_the_sort(vocab_size, rows, capfd):
    from jaxllm_kernels.top_k_cut import gpu

    rng = np.random.default_rng(0)
    logits = distinct_logits(rng, vocab_size, 20)[rows]
    top_k, top_p, min_p = (x[rows] for x in settings(rng))
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    lowest = gpu.top_k_top_p_min_p_cut(
        *map(jnp.asarray, (p, top_k, top_p, min_p)), interpret=gpu_interpret_params()
    )
    masked = np.where(p >= np.asarray(lowest)[:, None], logits, -np.inf)
    np.testing.assert_array_equal(masked, reference_mask(logits, top_k, top_p, min_p))
    printed = capfd.readouterr()
    assert "RACE" not in printed.out + printed.err
