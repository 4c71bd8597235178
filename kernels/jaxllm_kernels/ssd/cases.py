"""The op on the batches of `recurrent.cases`, and its results in float64."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm_kernels.recurrent.cases import CASES, Case, largest_error, run_case
from jaxllm_kernels.ssd.api import SsdOp

# The largest relative error (of norms).
TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The sizes of a layer, and how its tokens are drawn."""

    num_groups: int = 2
    num_heads: int = 6
    head_size: int = 8
    state_size: int = 16
    # Steps are drawn from zero to this, and rates from minus one to zero.
    longest_step: float = 0.5

    @property
    def rate(self) -> np.ndarray:
        return -np.random.default_rng(7).random(self.num_heads).astype(np.float32)


LAYERS = {
    "usual": Layer(),
    "one group": Layer(num_groups=1),
    "as many groups": Layer(num_groups=6, head_size=24),
    # They are no multiples of what processors and kernels take at a time.
    "odd sizes": Layer(head_size=10, state_size=43),
    # After one token nothing is left: cumulated decays are far below any exponent of float32.
    "long steps": Layer(longest_step=200.0),
    "tiny steps": Layer(longest_step=1e-4),
}


def draw(
    layer: Layer, random: np.random.Generator, num_tokens: int, dtype: DTypeLike = "float32"
) -> tuple[np.ndarray, ...]:
    """The operands of tokens, without those that all tokens share."""
    heads, states = (layer.num_heads, layer.head_size), (layer.num_groups, layer.state_size)
    narrow = (
        random.normal(size=(num_tokens, *sizes)).astype(jnp.dtype(dtype))
        for sizes in (heads, states, states)
    )
    step = layer.longest_step * random.random((num_tokens, layer.num_heads))
    return (*narrow, step.astype(np.float32))


def expected(layer: Layer, operands: tuple[np.ndarray, ...]) -> np.ndarray:
    """The outputs of one request in float64: [T, N, P]."""
    x, b, c, step = (np.asarray(operand, np.float64) for operand in operands)
    b, c = (np.repeat(each, layer.num_heads // layer.num_groups, axis=1) for each in (b, c))
    decay = np.exp(step * layer.rate.astype(np.float64))
    state, outputs = np.zeros((layer.num_heads, layer.head_size, layer.state_size)), []
    for t in range(len(x)):
        added = np.einsum("n,np,nk->npk", step[t], x[t], b[t])
        state = decay[t, :, None, None] * state + added
        outputs.append(np.einsum("npk,nk->np", state, c[t]))
    return np.stack(outputs)


def outputs(
    op: SsdOp, case: Case, layer: Layer, dtype: DTypeLike = "float32"
) -> dict[int, np.ndarray]:
    """What an implementation computes for each request of a case."""
    shape = (case.num_slots, layer.num_heads, layer.head_size, layer.state_size)
    return run_case(
        case,
        lambda its, state, rows: op(*its, rate=jnp.asarray(layer.rate), state=state, rows=rows),
        jnp.full(shape, jnp.nan, jnp.float32),
        lambda random, count: draw(layer, random, count, dtype),
    )


def error(op: SsdOp, name: str, layer: Layer, dtype: DTypeLike = "float32") -> float:
    """The largest relative error of an implementation for the requests of a case."""
    return largest_error(
        outputs(op, CASES[name], layer, dtype),
        lambda random, count: expected(layer, draw(layer, random, count, dtype)),
    )
