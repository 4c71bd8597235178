"""The op on the batches of `recurrent.cases`, and its results in float64."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm_kernels.gated_delta.api import DeltaOp
from jaxllm_kernels.recurrent.cases import CASES, Case, largest_error, run_case

# The largest relative error (of norms).
TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The sizes of a layer, and how its tokens are drawn."""

    num_key_heads: int = 2
    num_heads: int = 4
    key_size: int = 16
    value_size: int = 24
    decays_by_channel: bool = False
    # Log decays are drawn from minus this to zero.
    most_decay: float = 0.5
    most_beta: float = 1.0
    # Whether all keys are the same and no token is held back, so that every change undoes the one
    # before.
    repeats_keys: bool = False


LAYERS = {
    "usual": Layer(),
    "as many key heads": Layer(num_key_heads=3, num_heads=3, value_size=8),
    "by channel": Layer(num_key_heads=4, decays_by_channel=True),
    # After one token nothing is left: cumulated decays are far below any exponent of float32.
    "strong decays": Layer(most_decay=60.0),
    "strong decays by channel": Layer(num_key_heads=4, decays_by_channel=True, most_decay=60.0),
    "corrected too far": Layer(most_beta=2.0),
    "keys of no whole vector": Layer(key_size=20),
    "the same key": Layer(repeats_keys=True, most_decay=0.01),
}


def draw(
    layer: Layer, random: np.random.Generator, num_tokens: int, dtype: DTypeLike = "float32"
) -> tuple[np.ndarray, ...]:
    """The operands of tokens, up to the state."""
    heads, keys = layer.num_heads, (layer.num_key_heads, layer.key_size)
    q, k = (random.normal(size=(num_tokens, *keys)) for _ in range(2))
    if layer.repeats_keys:
        k[:] = np.random.default_rng(0).normal(size=keys)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = random.normal(size=(num_tokens, heads, layer.value_size))
    decays = (num_tokens, heads, *((layer.key_size,) if layer.decays_by_channel else ()))
    log_decay = -layer.most_decay * random.random(decays)
    beta = layer.most_beta * random.random(decays[:2])
    if layer.repeats_keys:
        beta[:] = 1
    narrow = (x.astype(jnp.dtype(dtype)) for x in (q, k, v))
    return (*narrow, log_decay.astype(np.float32), beta.astype(np.float32))


def expected(operands: tuple[np.ndarray, ...]) -> np.ndarray:
    """The outputs of one request in float64: [T, N, V]."""
    q, k, v, log_decay, beta = (np.asarray(x, np.float64) for x in operands)
    repeats = v.shape[1] // q.shape[1]
    q, k = (np.repeat(x, repeats, axis=1) for x in (q, k))
    log_decay = log_decay.reshape(*log_decay.shape[:2], -1, 1)
    state, outputs = np.zeros((v.shape[1], k.shape[2], v.shape[2])), []
    for t in range(len(v)):
        state = np.exp(log_decay[t]) * state
        change = beta[t, :, None] * (v[t] - np.einsum("nkv,nk->nv", state, k[t]))
        state = state + np.einsum("nk,nv->nkv", k[t], change)
        outputs.append(np.einsum("nkv,nk->nv", state, q[t]))
    return np.stack(outputs)


def outputs(
    op: DeltaOp, case: Case, layer: Layer, dtype: DTypeLike = "float32"
) -> dict[int, np.ndarray]:
    """What an implementation computes for each request of a case."""
    shape = (case.num_slots, layer.num_heads, layer.key_size, layer.value_size)
    return run_case(
        case,
        lambda operands, state, rows: op(*operands, state=state, rows=rows),
        jnp.full(shape, jnp.nan, jnp.float32),
        lambda random, count: draw(layer, random, count, dtype),
    )


def error(op: DeltaOp, name: str, layer: Layer, dtype: DTypeLike = "float32") -> float:
    """The largest relative error of an implementation for the requests of a case."""
    return largest_error(
        outputs(op, CASES[name], layer, dtype),
        lambda random, count: expected(draw(layer, random, count, dtype)),
    )
