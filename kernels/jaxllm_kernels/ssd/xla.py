"""The state space of Mamba2 in plain XLA, for every platform.

A decode is the formula. A tile of tokens i, with the cumulated log decays L and the state S before
the tile, is computed at once:

    out_i = e^L_i S c_i + sum over j <= i of (c_i . b_j) e^(L_i - L_j) step_j x_j
    S <- e^L_last S + sum over j of e^(L_last - L_j) step_j x_j b_j^T

No exponent is above zero, whatever the decays are. What is between b and c is computed once for all
heads of a group.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm_kernels.platform import Chip
from jaxllm_kernels.recurrent.rows import StateRows
from jaxllm_kernels.recurrent.scan import AtOnce, Chunk, Decodes, Tiles, scan_rows


@dataclass(frozen=True)
class XlaSsd:
    """`api.SsdOp` on every platform."""

    name: str = "xla"
    at_once: AtOnce = AtOnce()

    def tuned_for(self, chip: Chip) -> "XlaSsd":
        """Return the op with its tunables chosen for a chip."""
        return dataclasses.replace(self, at_once=AtOnce.on(chip))

    def __call__(
        self,
        x: jax.Array,
        b: jax.Array,
        c: jax.Array,
        step: jax.Array,
        rate: jax.Array,
        state: jax.Array,
        rows: StateRows,
        *,
        decodes: Decodes | None = None,
        tiles: Tiles | None = None,
        out_shape: tuple[int, ...] | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """`decodes` and `tiles` compute these in place of XLA. `out_shape` is what `tiles` has
        beside tokens in place of [N, P]."""
        of_token = x.shape[1:] if out_shape is None else out_shape

        def run_step(state: jax.Array, operands: Any) -> tuple[jax.Array, jax.Array]:
            state, y = _step(state, operands)
            return state, y.reshape(of_token)

        def run_decodes(
            operands: Any, state: jax.Array, rows: StateRows
        ) -> tuple[jax.Array, jax.Array]:
            assert decodes is not None
            y, state = decodes(operands, state, rows)
            return y.reshape(len(y), *of_token), state

        out, state = scan_rows(
            run_step,
            CHUNK,
            (x, b, c, step, step * rate),
            state,
            rows,
            out_shape=of_token,
            at_once=self.at_once,
            decodes=run_decodes if decodes is not None else None,
            tiles=tiles,
        )
        return out.reshape(x.shape), state


def _step(state: jax.Array, operands: Any) -> tuple[jax.Array, jax.Array]:
    """One token: x [N, P], b and c [G, K], the state [N, P, K]."""
    x, b, c, step, log_decay = operands
    heads_of_group = len(x) // len(b)
    b, c = (jnp.repeat(it.astype(jnp.float32), heads_of_group, axis=0)[:, None] for it in (b, c))
    x = step[:, None] * x.astype(jnp.float32)
    state = jnp.exp(log_decay)[:, None, None] * state + x[:, :, None] * b
    return state, (state * c).sum(axis=2)


def _prepare(operands: Any) -> Any:
    """What a tile computes without its state, of x [C, N, P], b and c [C, G, K]."""
    x, b, c, step, log_decay = operands
    num_heads, num_groups = x.shape[1], b.shape[1]

    def of_groups(rows: jax.Array) -> jax.Array:
        """[N, C, P] to [G, C, rows of all heads of a group]."""
        rows = rows.reshape(num_groups, -1, *rows.shape[1:]).swapaxes(1, 2)
        return rows.reshape(*rows.shape[:2], -1)

    x, b, c = (it.astype(jnp.float32).swapaxes(0, 1) for it in (x, b, c))  # [heads, C, ...]
    x = step.T[:, :, None] * x
    decays = jnp.cumsum(log_decay.T, axis=1)  # [N, C]
    between = jnp.exp(jnp.minimum(decays[:, :, None] - decays[:, None, :], 0))
    scores = _product(c, b.swapaxes(1, 2))  # [G, C, C]
    scores = jnp.repeat(scores, num_heads // num_groups, axis=0) * jnp.tril(between)
    kept = of_groups(jnp.exp(decays[:, -1:] - decays)[:, :, None] * x)
    added = _product(kept.swapaxes(1, 2), b)  # [G, rows, K]
    return c, jnp.exp(decays), _product(scores, x), added


def _advance(state: jax.Array, prepared: Any) -> tuple[jax.Array, jax.Array]:
    """Compute what is left of a tile, with the state [N, P, K] before it. Its product is that of
    whole groups, with the rows of all their heads."""
    c, since_start, out, added = prepared
    num_heads, head_size, state_size = state.shape
    num_groups = len(c)
    grouped = state.reshape(num_groups, -1, state_size)
    seen = _product(c, grouped.swapaxes(1, 2))  # [G, C, rows]
    seen = seen.reshape(num_groups, c.shape[1], -1, head_size).swapaxes(1, 2)
    out = out + since_start[:, :, None] * seen.reshape(num_heads, -1, head_size)
    state = since_start[:, -1, None, None] * state + added.reshape(state.shape)
    return state, out.swapaxes(0, 1)


CHUNK = Chunk(_prepare, _advance)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")
