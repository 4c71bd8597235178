"""The convolution in plain XLA, for every platform.

Each tap multiplies the inputs shifted by some tokens, where these are tokens of the same row. The
first tokens of a row get the rest of their sums from the row's state: W - 1 sums for each row, and
nothing of the size of the states for each token.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.causal_conv.api import Activation, activate
from jaxllm_kernels.common import from_storage, to_storage
from jaxllm_kernels.recurrent.rows import StateRows


@dataclass(frozen=True)
class XlaConv:
    """`api.ConvOp` on every platform."""

    name: str = "xla"

    def num_inputs(self, width: int) -> int:
        return width - 1

    def __call__(
        self,
        x: jax.Array,
        weight: jax.Array,
        bias: jax.Array | None,
        state: jax.Array,
        rows: StateRows,
        *,
        activation: Activation | None,
    ) -> tuple[jax.Array, jax.Array]:
        # Read once. Otherwise XLA for GPUs reads the states again for each part of the outputs, and
        # copies those of all slots, since some of these reads come after the update.
        before = jax.lax.optimization_barrier(_before(state, rows))
        y, last = convolve(x, weight, bias, before, rows, activation=activation)
        return y, state.at[rows.slots].set(last, mode="drop")


def convolve(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    before: jax.Array,
    rows: StateRows,
    *,
    activation: Activation | None,
) -> tuple[jax.Array, jax.Array]:
    """The outputs [T, C], and the last inputs that each row leaves [R, I, C]. `before` are those
    before each row, [R, I, C] of `state_dtype`, with zeros before the first token of a request."""
    num_rows, num_tokens, width = len(rows.slots), len(x), len(weight)
    taps = weight.astype(jnp.float32)
    before = from_storage(before, x.dtype)  # zeros are zeros in every dtype
    read = before[:, before.shape[1] - (width - 1) :].astype(jnp.float32)
    inputs = x.astype(jnp.float32)
    y = taps[-1] * inputs
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    if rows.decode_only:
        y = y + (taps[:-1] * read).sum(axis=1)
        last = jnp.concatenate([before[:, 1:], x[:, None]], axis=1)
    else:
        offsets = rows.offsets[:, None]
        for shift in range(1, width):
            shifted = jnp.pad(inputs, ((shift, 0), (0, 0)))[:num_tokens]
            y = y + jnp.where(offsets >= shift, taps[width - 1 - shift] * shifted, 0)
        first = rows.token_rows[:, None] * (width - 1) + offsets
        first = jnp.where(offsets < width - 1, first, num_rows * (width - 1))[:, 0]
        rests = _rests(read, taps).reshape(-1, x.shape[1])
        y = y + rests.at[first].get(mode="fill", fill_value=0)
        last = _last_inputs(x, before, rows)
    return activate(y, activation).astype(x.dtype), to_storage(last)


def _before(state: jax.Array, rows: StateRows) -> jax.Array:
    """The inputs before each row, or zeros: [R, I, C], of the state's dtype."""

    def read() -> jax.Array:
        return state.at[rows.slots].get(mode="fill", fill_value=0)

    if len(rows.slots) == 1:
        # Reads and writes of a single row become slices, which XLA for CPUs would fuse; then it
        # would copy the states of all slots (see `recurrent.scan`).
        none = jnp.zeros((1, *state.shape[1:]), state.dtype)
        return jax.lax.cond(rows.begins[0], lambda: none, read)
    return jnp.where(rows.begins[:, None, None], 0, read())


def _rests(before: jax.Array, taps: jax.Array) -> jax.Array:
    """What the inputs before a row add to the sums of its first W - 1 tokens: [R, W - 1, C]."""
    count = before.shape[1]
    return jnp.stack(
        [(taps[: count - i] * before[:, i:]).sum(axis=1) for i in range(count)], axis=1
    )


def _last_inputs(x: jax.Array, before: jax.Array, rows: StateRows) -> jax.Array:
    """The last inputs that each row leaves, of its state and its tokens: [R, I, C]."""
    count = before.shape[1]
    # Their places in the row; below zero they are those of the state.
    places = rows.num_kept[:, None] - count + jnp.arange(count)
    own = x.at[rows.query_starts[:-1, None] + places].get(mode="clip")
    older = jnp.take_along_axis(before, jnp.clip(count + places, 0, count - 1)[..., None], axis=1)
    return jnp.where(places[..., None] >= 0, own, older)
