"""Products of heads on CPU in C++. A row's result does not depend on the other rows."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.common import round_up
from jaxllm_kernels.native.library import Library

# The kernel takes so many inputs of a transposed matrix at a time, and so many outputs of another.
_STEP = 32


@dataclass(frozen=True)
class NativeHeadProducts:
    """`api.HeadProducts` by the native library, for its dtypes."""

    library: Library
    name: str = "native"

    @classmethod
    def load(cls, library: Library) -> "NativeHeadProducts":
        """Load the functions; raise ValueError, which says why, if they cannot be built."""
        library.add_head_products()
        return cls(library)

    def times(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        num_outputs = weight.shape[2]
        y = self._call("jaxllm_heads_times", x, _filled_up(weight), round_up(num_outputs, _STEP))
        return y[..., :num_outputs]

    def times_transposed(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return self._call(
            "jaxllm_heads_times_transposed", _filled_up(x), _filled_up(weight), weight.shape[1]
        )

    def _call(self, function: str, x: jax.Array, weight: jax.Array, num_outputs: int) -> jax.Array:
        call = jax.ffi.ffi_call(
            self.library.target(function, x.dtype),
            jax.ShapeDtypeStruct((*x.shape[:2], num_outputs), x.dtype),
        )
        return call(x, weight)


def _filled_up(x: jax.Array) -> jax.Array:
    """With zeros at the end of the last axis, to whole steps."""
    missing = -x.shape[-1] % _STEP
    return jnp.pad(x, ((0, 0), (0, 0), (0, missing))) if missing else x
