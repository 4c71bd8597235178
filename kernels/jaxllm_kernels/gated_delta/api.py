"""The gated delta rule: the contract of every implementation.

A head keeps a matrix S [K, V]: what it holds of a key is S^T k. Each token lets it decay, corrects
what it holds of the token's key towards the token's value, and reads it with a query:

    S <- diag(exp(log_decay)) S
    S <- S + beta k (v - S^T k)^T
    out = S^T q

One call computes one layer for one step, of whose rows some go on from the states that earlier
steps have left (see `recurrent.rows`).

Axis letters: T tokens, N heads, M heads of queries and keys, K key size, V value size, S slots.
"""

from typing import Protocol

import jax

from jaxllm_kernels.recurrent.rows import StateRows


class DeltaOp(Protocol):
    """An implementation. It is a static argument of jitted functions: a frozen dataclass."""

    @property
    def name(self) -> str:
        """For logs and reports."""
        ...

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        log_decay: jax.Array,
        beta: jax.Array,
        state: jax.Array,
        rows: StateRows,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the outputs, float32 [T, N, V], and the states after the step.

        Args:
          q, k: [T, M, K]. Head n has those of head n // (N // M). Keys have at most length one.
          v: [T, N, V].
          log_decay: float32 [T, N], or [T, N, K] if each row of S decays by itself. At most zero.
          beta: float32 [T, N], from zero to two.
          state: float32 [S, N, K, V]. Donate it: it is updated in place.

        Everything is computed in float32. A row's results do not depend on other rows, and on the
        borders of its chunks only by the order of sums. Operands of padding have no influence,
        whatever they are; its outputs are finite.
        """
        ...
