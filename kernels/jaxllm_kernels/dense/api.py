"""The contract of products of activations with a weight, and the default implementation."""

from typing import Protocol

import jax

from jaxllm_kernels.dense.xla import RoundedXlaMatmul, XlaMatmul


class Matmul(Protocol):
    """x [..., in] times weight [out, in], summed in float32: float32 [..., out].

    Implementations are static arguments of jitted functions, so they must be hashable: frozen
    dataclasses. They are traced by the caller.
    """

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array: ...


XLA: Matmul = XlaMatmul()
ROUNDED_XLA: Matmul = RoundedXlaMatmul()
