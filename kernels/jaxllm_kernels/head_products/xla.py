"""Products of heads by XLA, on every platform."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class XlaHeadProducts:
    name: str = "xla"

    def times(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return _product("nti,nio->nto", x, weight)

    def times_transposed(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return _product("nti,noi->nto", x, weight)


def _product(subscripts: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    # Heads come first: CPUs without instructions for bfloat16 have no product of 16 bits whose
    # heads are inside.
    precision = "highest" if x.dtype == jnp.float32 else "default"
    y = jnp.einsum(
        subscripts,
        x.swapaxes(0, 1),
        weight,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return y.swapaxes(0, 1).astype(x.dtype)


XLA_HEADS = XlaHeadProducts()
