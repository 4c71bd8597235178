"""What every implementation must compute: named cases, and a comparison with float64."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm_kernels.coded import CodedWeight, CodeForm, values
from jaxllm_kernels.coded_cases import random_weight
from jaxllm_kernels.experts.api import GELU_TANH, ExpertsConfig, ExpertsOp, ExpertWeights

# gpt-oss's activation.
CLAMPED = ExpertsConfig(gate_slope=1.702, up_offset=1.0, limit=0.7)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch and how it is routed."""

    num_tokens: int
    num_choices: int
    num_experts: int
    size: int = 64
    hidden_size: int = 96
    config: ExpertsConfig = ExpertsConfig()
    has_bias: bool = False
    # (random, case) -> int [T, k]; None: every choice is equally likely.
    route: Callable[[np.random.Generator, "Case"], np.ndarray] | None = None


def _evenly(random: np.random.Generator, case: Case) -> np.ndarray:
    rows = (random.permutation(case.num_experts) for _ in range(case.num_tokens))
    return np.stack([row[: case.num_choices] for row in rows])


def _first_for_all(random: np.random.Generator, case: Case) -> np.ndarray:
    """All tokens choose the first expert, and none the last."""
    rest = dataclasses.replace(case, num_experts=case.num_experts - 2)
    return np.concatenate(
        [np.zeros((case.num_tokens, 1)), 1 + _evenly(random, rest)[:, : case.num_choices - 1]], 1
    )


def _one_row_each(random: np.random.Generator, case: Case) -> np.ndarray:
    del random
    return np.arange(case.num_tokens * case.num_choices).reshape(case.num_tokens, -1)


def _some_are_elsewhere(random: np.random.Generator, case: Case) -> np.ndarray:
    """Numbers of other devices' experts, on both sides, and tokens of padding at the end."""
    chosen = _evenly(random, dataclasses.replace(case, num_experts=3 * case.num_experts))
    chosen -= case.num_experts
    chosen[-(case.num_tokens // 4) :] = case.num_experts
    return chosen


def _none(random: np.random.Generator, case: Case) -> np.ndarray:
    del random
    return np.full((case.num_tokens, case.num_choices), case.num_experts)


CASES: Mapping[str, Case] = {
    "one token": Case(num_tokens=1, num_choices=3, num_experts=8),
    "few tokens": Case(num_tokens=5, num_choices=2, num_experts=16),
    "even": Case(num_tokens=33, num_choices=4, num_experts=8),
    "all experts": Case(num_tokens=7, num_choices=4, num_experts=4),
    "one expert has all tokens, one has none": Case(
        num_tokens=150, num_choices=3, num_experts=9, route=_first_for_all
    ),
    "an expert for each choice": Case(
        num_tokens=4, num_choices=2, num_experts=8, route=_one_row_each
    ),
    "experts elsewhere, and padding": Case(
        num_tokens=24, num_choices=4, num_experts=6, route=_some_are_elsewhere
    ),
    "padding only": Case(num_tokens=4, num_choices=2, num_experts=4, route=_none),
    "one choice": Case(num_tokens=20, num_choices=1, num_experts=4),
    "scaled inputs": Case(
        num_tokens=20, num_choices=2, num_experts=4, config=ExpertsConfig(scales_input=True)
    ),
    "clamped, with biases": Case(
        num_tokens=21, num_choices=2, num_experts=8, config=CLAMPED, has_bias=True
    ),
    "clamped without offset": Case(
        num_tokens=9, num_choices=2, num_experts=4, config=ExpertsConfig(limit=0.5)
    ),
    "gelu": Case(num_tokens=21, num_choices=2, num_experts=8, config=GELU_TANH),
    "without gates": Case(
        num_tokens=33,
        num_choices=3,
        num_experts=8,
        config=ExpertsConfig(is_gated=False),
        has_bias=True,
    ),
    "wide": Case(num_tokens=40, num_choices=2, num_experts=3, size=1568, hidden_size=1120),
}


def operands(
    case: Case, dtype: DTypeLike, seed: int = 0, form: CodeForm | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, ExpertWeights]:
    """Tokens, choices, factors and weights of a case; with a form, these are codes."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape) / shape[-1] ** 0.5, dtype)

    tokens, experts, size, hidden = case.num_tokens, case.num_experts, case.size, case.hidden_size
    chosen = (case.route or _evenly)(random, case).astype(np.int32)
    factors = random.random((tokens, case.num_choices)).astype(np.float32)

    def matrix(*shape: int) -> jax.Array | CodedWeight:
        return normal(*shape) if form is None else random_weight(random, shape, form)

    halves = case.config.num_halves
    weights = ExpertWeights(
        gate_up=matrix(experts, halves, size, hidden),
        down=matrix(experts, hidden, size),
        gate_up_bias=3 * normal(experts, halves, size) if case.has_bias else None,
        down_bias=3 * normal(experts, hidden) if case.has_bias else None,
    )
    x = jnp.asarray(random.standard_normal((tokens, hidden)), dtype)
    return x, jnp.asarray(chosen), jnp.asarray(factors), weights


def expected(
    x: jax.Array,
    chosen: jax.Array,
    factors: jax.Array,
    weights: ExpertWeights,
    config: ExpertsConfig,
) -> np.ndarray:
    """The op in float64."""
    gate_up, down = (
        np.asarray(values(its) if isinstance(its, CodedWeight) else its, np.float64)
        for its in (weights.gate_up, weights.down)
    )
    biases = [
        None if array is None else np.asarray(array, np.float64)
        for array in (weights.gate_up_bias, weights.down_bias)
    ]
    sums = np.zeros(x.shape)
    for token, row in enumerate(np.asarray(x, np.float64)):
        choices = zip(
            np.asarray(chosen[token]), np.asarray(factors[token], np.float64), strict=True
        )
        for expert, factor in choices:
            if not 0 <= expert < len(down):
                continue
            halves = gate_up[expert] @ (row * factor if config.scales_input else row)
            if biases[0] is not None:
                halves = halves + biases[0][expert]
            output = down[expert] @ _between(halves, config)
            if biases[1] is not None:
                output = output + biases[1][expert]
            sums[token] += output if config.scales_input else output * factor
    return sums


def _between(halves: np.ndarray, config: ExpertsConfig) -> np.ndarray:
    """What an expert computes between its matrices."""
    if not config.is_gated:
        return np.square(np.maximum(halves[0], 0))
    gate, up = halves
    if config.limit is not None:
        gate = np.minimum(gate, config.limit)
        up = np.clip(up, -config.limit, config.limit)
    inner = gate + config.gate_cubic * gate**3
    return (up + config.up_offset) * gate / (1 + np.exp(-config.gate_slope * inner))


# Of the norm: the inner values of 16-bit experts are rounded.
_TOLERANCES = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 6e-3}


def run_case(
    op: ExpertsOp, case: Case, dtype: DTypeLike, form: CodeForm | None = None
) -> np.ndarray:
    """Compare an implementation with float64, and return its result. With a form, weights are codes
    as the implementation holds them."""
    if form is not None:
        up, down = (case.size, case.hidden_size), (case.hidden_size, case.size)
        held = op.held(form, *up)
        assert held == op.held(form, *down), "the cases have one form for both matrices"
        form = held
    x, chosen, factors, weights = operands(case, dtype, form=form)
    run = jax.jit(lambda *operands: op(*operands, config=case.config))
    y = run(x, chosen, factors, weights)
    assert y.dtype == jnp.float32 and y.shape == x.shape, y
    exact = expected(x, chosen, factors, weights, case.config)
    error = np.linalg.norm(np.asarray(y, np.float64) - exact)
    bound = _TOLERANCES[jnp.dtype(dtype).name] * np.linalg.norm(exact)
    assert error <= bound, f"{op.name}: the error is {error}, at most {bound} is right"
    return np.asarray(y)
