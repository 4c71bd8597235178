"""The state space of Mamba2 in plain XLA, for every platform.

A decode is the formula. A tile of tokens i, with the cumulated log decays L and the state S before
the tile, is computed at once:

    out_i = e^L_i S c_i + sum over j <= i of (c_i . b_j) e^(L_i - L_j) step_j x_j
    S <- e^L_last S + sum over j of e^(L_last - L_j) step_j x_j b_j^T

No exponent is above zero, whatever the decays are. What is between b and c is computed once for all
heads of a group.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm_kernels.platform import Chip
from jaxllm_kernels.recurrent.rows import StateRows
from jaxllm_kernels.recurrent.scan import decodes_at_once, scan_rows


@dataclass(frozen=True)
class XlaSsd:
    """`api.SsdOp` on every platform."""

    name: str = "xla"
    at_once: int = 1  # decodes of an iteration

    def tuned_for(self, chip: Chip) -> "XlaSsd":
        """Return the op with its tunables chosen for a chip."""
        return dataclasses.replace(self, at_once=decodes_at_once(chip))

    def __call__(
        self,
        x: jax.Array,
        b: jax.Array,
        c: jax.Array,
        step: jax.Array,
        rate: jax.Array,
        state: jax.Array,
        rows: StateRows,
    ) -> tuple[jax.Array, jax.Array]:
        return scan_rows(
            _step,
            _chunk,
            (x, b, c, step, step * rate),
            state,
            rows,
            out_shape=x.shape[1:],
            at_once=self.at_once,
        )


def _step(state: jax.Array, operands: Any) -> tuple[jax.Array, jax.Array]:
    """One token: x [N, P], b and c [G, K], the state [N, P, K]."""
    x, b, c, step, log_decay = operands
    heads_of_group = len(x) // len(b)
    b, c = (jnp.repeat(it.astype(jnp.float32), heads_of_group, axis=0)[:, None] for it in (b, c))
    x = step[:, None] * x.astype(jnp.float32)
    state = jnp.exp(log_decay)[:, None, None] * state + x[:, :, None] * b
    return state, (state * c).sum(axis=2)


def _chunk(state: jax.Array, operands: Any) -> tuple[jax.Array, jax.Array]:
    """A tile: x [C, N, P], b and c [C, G, K], the state [N, P, K]."""
    x, b, c, step, log_decay = operands
    num_groups = b.shape[1]
    # Letters: i and j tokens, g groups, h heads of a group, p, k.
    x, log_decay = (
        it.reshape(len(it), num_groups, -1, *it.shape[2:])
        for it in (step[:, :, None] * x.astype(jnp.float32), log_decay)
    )
    b, c = b.astype(jnp.float32), c.astype(jnp.float32)
    grouped = state.reshape(*x.shape[1:], -1)
    decays = jnp.cumsum(log_decay, axis=0)  # [C, G, H]
    between = jnp.exp(jnp.minimum(decays[:, None] - decays[None], 0))
    is_before = jnp.tril(jnp.ones((len(x), len(x)), bool))
    between = jnp.where(is_before[:, :, None, None], between, 0)
    scores = _sum("igk,jgk->ijg", c, b)[..., None] * between
    seen = _sum("igk,ghpk->ighp", c, grouped) * jnp.exp(decays)[..., None]
    out = seen + _sum("ijgh,jghp->ighp", scores, x)
    kept = jnp.exp(decays[-1] - decays)[..., None] * x
    added = _sum("jghp,jgk->ghpk", kept, b)
    grouped = jnp.exp(decays[-1])[..., None, None] * grouped + added
    return grouped.reshape(state.shape), out.reshape(len(x), *state.shape[:2])


_sum = functools.partial(jnp.einsum, precision="highest")
