"""The state space of Mamba2 on CPUs, in C++."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.native.library import Library
from jaxllm_kernels.recurrent.native import advance_rows
from jaxllm_kernels.recurrent.rows import StateRows


@dataclass(frozen=True)
class NativeSsd:
    """`api.SsdOp` by the native library. Every row is computed token by token, so its bits do not
    depend on where it is cut."""

    library: Library
    name: str = "native"

    @classmethod
    def load(cls, library: Library) -> "NativeSsd":
        """Load the function; raise ValueError, which says why, if it cannot be built."""
        library.add_ssd()
        return cls(library)

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
        operands = (*(it.astype(jnp.float32) for it in (x, b, c)), step, rate)
        return advance_rows(
            self.library, "jaxllm_ssd", operands, state, rows, out_shape=x.shape[1:]
        )
