"""The gated delta rule on CPUs, in C++."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.native.library import Library
from jaxllm_kernels.recurrent.native import advance_rows
from jaxllm_kernels.recurrent.rows import StateRows


@dataclass(frozen=True)
class NativeDelta:
    """`api.DeltaOp` by the native library. Every row is computed token by token, so its bits do not
    depend on where it is cut."""

    library: Library
    name: str = "native"

    @classmethod
    def load(cls, library: Library) -> "NativeDelta":
        """Load the function; raise ValueError, which says why, if it cannot be built."""
        library.add_delta()
        return cls(library)

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
        operands = (
            *(x.astype(jnp.float32) for x in (q, k, v)),
            log_decay.reshape(*beta.shape, -1),
            beta,
        )
        return advance_rows(
            self.library, "jaxllm_delta", operands, state, rows, out_shape=v.shape[1:]
        )
