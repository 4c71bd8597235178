"""The op on the batches of `recurrent.cases`, and its results in float64."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm_kernels.causal_conv.api import Activation, ConvOp, state_dtype
from jaxllm_kernels.recurrent.cases import CASES, largest_error, run_case

# The largest relative error (of norms).
TOLERANCES = {"float32": 1e-6, "bfloat16": 5e-3}


@dataclass(frozen=True, kw_only=True)
class Filter:
    """The filters of a layer."""

    num_channels: int = 10
    width: int = 4
    has_bias: bool = False
    activation: Activation | None = "silu"

    def weights(self, dtype: DTypeLike) -> tuple[jax.Array, jax.Array | None]:
        random = np.random.default_rng(7)
        weight, bias = (
            jnp.asarray(random.normal(size=shape), dtype)
            for shape in ((self.width, self.num_channels), self.num_channels)
        )
        return weight, bias if self.has_bias else None

    def expected(self, x: np.ndarray) -> np.ndarray:
        """The outputs of one request in float64."""
        weight, bias = self.weights(x.dtype)
        inputs = np.concatenate([np.zeros((self.width - 1, x.shape[1])), x.astype(np.float64)])
        y = np.zeros(x.shape) if bias is None else np.asarray(bias, np.float64)
        for i, tap in enumerate(np.asarray(weight, np.float64)):
            y = y + tap * inputs[i : i + len(x)]
        return y / (1 + np.exp(-y)) if self.activation else y


FILTERS = {
    "usual": Filter(),
    "with a bias": Filter(has_bias=True),
    "short": Filter(width=3, activation=None),
    "two taps": Filter(width=2),
}


def error(op: ConvOp, name: str, layer: Filter, dtype: DTypeLike = "float32") -> float:
    """The largest relative error of an implementation for the requests of a case."""
    case, (weight, bias) = CASES[name], layer.weights(dtype)

    def draw(random: np.random.Generator, count: int) -> np.ndarray:
        return random.normal(size=(count, layer.num_channels)).astype(jnp.dtype(dtype))

    shape = (case.num_slots, op.num_inputs(layer.width), layer.num_channels)
    outputs = run_case(
        case,
        lambda x, state, rows: op(x, weight, bias, state, rows, activation=layer.activation),
        jnp.asarray(np.full(shape, np.nan, jnp.dtype(dtype)).view(state_dtype(dtype))),
        draw,
    )
    return largest_error(outputs, lambda random, count: layer.expected(draw(random, count)))
