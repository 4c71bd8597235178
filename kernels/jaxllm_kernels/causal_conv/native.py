"""The convolution on CPUs, in C++: one call of the library of native kernels per layer."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.causal_conv.api import Activation
from jaxllm_kernels.native.library import Library
from jaxllm_kernels.recurrent.rows import StateRows


@dataclass(frozen=True)
class NativeConv:
    """`api.ConvOp` by the native library, for inputs of a dtype that it has."""

    library: Library
    name: str = "native"

    @classmethod
    def load(cls, library: Library, dtype: DTypeLike) -> "NativeConv":
        """Load the function; raise ValueError, which says why, if it cannot be used."""
        name = jnp.dtype(dtype).name
        if name not in library.dtypes:
            raise ValueError(f"dtype={name!r} is not one of {', '.join(library.dtypes)}")
        library.add_conv()
        return cls(library)

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
        call = jax.ffi.ffi_call(
            self.library.target("jaxllm_conv", x.dtype),
            (
                jax.ShapeDtypeStruct(x.shape, x.dtype),
                jax.ShapeDtypeStruct(state.shape, state.dtype),
            ),
            input_output_aliases={3: 1},
        )
        y, state = call(
            x,
            # As parameters have it, so that nothing is transposed.
            weight.T.astype(x.dtype),
            jnp.zeros(0, x.dtype) if bias is None else bias.astype(x.dtype),
            state,
            rows.slots,
            rows.begins,
            rows.query_starts,
            rows.lengths,
            rows.num_kept,
            is_silu=activation == "silu",
        )
        return y, state
