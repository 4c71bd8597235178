"""Routers: which experts a token chooses, and with which factors, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.layers.router import Router, RouterSpec

NUM_EXPERTS, HIDDEN = 12, 16


def router(spec, *, num_choices=3, dtype=jnp.float32, seed=0):
    module = Router(spec, HIDDEN, NUM_EXPERTS, num_choices, dtype=dtype)
    random = np.random.default_rng(seed)
    module.weight[...] = jnp.asarray(
        random.standard_normal((NUM_EXPERTS, HIDDEN)), module.weight.dtype
    )
    if module.bias is not None:
        module.bias[...] = jnp.asarray(random.standard_normal(NUM_EXPERTS), module.bias.dtype)
    if module.e_score_correction_bias is not None:
        bias = 0.3 * random.standard_normal(NUM_EXPERTS)
        module.e_score_correction_bias[...] = jnp.asarray(bias, jnp.float32)
    return module


def tokens(dtype=jnp.float32, count=20):
    return jnp.asarray(np.random.default_rng(1).standard_normal((count, HIDDEN)), dtype)


def logits_of(module, x):
    logits = np.asarray(x, np.float64) @ np.asarray(module.weight[...], np.float64).T
    return logits if module.bias is None else logits + np.asarray(module.bias[...], np.float64)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def best(scores, count):
    return np.argsort(-scores, axis=-1, kind="stable")[:, :count]


def compare(module, x, chosen, factors):
    ours = module.route(x)
    np.testing.assert_array_equal(ours[0], chosen)
    np.testing.assert_allclose(ours[1], factors, atol=1e-5)


@pytest.mark.parametrize("normalises", [False, True])
def test_softmax_over_all_experts(normalises):
    module, x = router(RouterSpec(scores="softmax", normalises=normalises)), tokens()
    scores = softmax(logits_of(module, x))
    chosen = best(scores, 3)
    factors = np.take_along_axis(scores, chosen, 1)
    compare(module, x, chosen, factors / factors.sum(1, keepdims=True) if normalises else factors)


def test_softmax_over_the_chosen_experts():
    module, x = router(RouterSpec(scores="softmax of chosen", bias=True)), tokens()
    logits = logits_of(module, x)
    chosen = best(logits, 3)
    compare(module, x, chosen, softmax(np.take_along_axis(logits, chosen, 1)))


def test_a_bias_counts_for_the_choice_alone():
    spec = RouterSpec(scores="sigmoid", normalises=True, has_selection_bias=True, scale=2.5)
    module, x = router(spec), tokens()
    scores = 1 / (1 + np.exp(-logits_of(module, x)))
    chosen = best(scores + np.asarray(module.e_score_correction_bias[...]), 3)
    assert (chosen != best(scores, 3)).any()
    factors = np.take_along_axis(scores, chosen, 1)
    compare(module, x, chosen, 2.5 * factors / factors.sum(1, keepdims=True))


@pytest.mark.parametrize("best_of_group", [1, 2])
def test_experts_are_chosen_in_the_best_groups(best_of_group):
    spec = RouterSpec(
        scores="sigmoid",
        has_selection_bias=True,
        num_groups=4,
        chosen_groups=2,
        best_of_group=best_of_group,
    )
    module, x = router(spec), tokens()
    scores = 1 / (1 + np.exp(-logits_of(module, x)))
    # Scores below zero must not make experts of other groups eligible.
    module.e_score_correction_bias[...] = module.e_score_correction_bias[...] - 2.0
    ranked = scores + np.asarray(module.e_score_correction_bias[...])
    groups = ranked.reshape(len(x), 4, 3)
    rank = np.sort(groups, axis=2)[:, :, -best_of_group:].sum(2)
    kept = np.zeros((len(x), 4), bool)
    np.put_along_axis(kept, best(rank, 2), True, 1)
    chosen = best(np.where(np.repeat(kept, 3, 1), ranked, -np.inf), 3)
    assert (chosen != best(ranked, 3)).any()
    compare(module, x, chosen, np.take_along_axis(scores, chosen, 1))


def test_ties_go_to_the_expert_with_the_lowest_number():
    module = router(RouterSpec(scores="softmax"), num_choices=4)
    module.weight[...] = jnp.zeros_like(module.weight[...]).at[7].set(1.0)
    chosen, _ = module.route(jnp.ones((2, HIDDEN)))
    np.testing.assert_array_equal(chosen, [[7, 0, 1, 2]] * 2)


def test_a_sum_of_factors_has_a_least_value():
    module = router(RouterSpec(scores="softmax", normalises=True, least_sum=10.0))
    _, factors = module.route(tokens())
    assert (np.asarray(factors).sum(1) < 0.1).all()


def test_types_of_logits_and_factors():
    x = tokens(jnp.bfloat16)
    wide = router(RouterSpec(scores="sigmoid", in_float32=True), dtype=jnp.bfloat16)
    assert wide.weight.dtype == jnp.float32
    compare(
        wide,
        x,
        *(lambda s: (best(s, 3), np.take_along_axis(s, best(s, 3), 1)))(
            1 / (1 + np.exp(-logits_of(wide, x)))
        ),
    )
    rounded = router(RouterSpec(scores="softmax", rounds_factors=True), dtype=jnp.bfloat16)
    _, factors = jax.jit(rounded.route)(x)
    assert factors.dtype == jnp.float32
    np.testing.assert_array_equal(factors, factors.astype(jnp.bfloat16).astype(jnp.float32))


def test_sigmoids_that_are_equal_do_not_hide_the_larger_logit():
    module = router(RouterSpec(scores="sigmoid"), num_choices=1)
    x = 100 * tokens()  # sigmoids of one, of several experts
    logits = logits_of(module, x)
    scores = np.asarray(jax.nn.sigmoid(jnp.asarray(logits, jnp.float32)))
    assert ((scores == 1).sum(-1) > 1).any()
    np.testing.assert_array_equal(module.route(x)[0], best(logits, 1))
