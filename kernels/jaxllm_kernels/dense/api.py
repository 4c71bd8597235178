"""The contract of products of activations with a weight, and the default implementation."""

from typing import Protocol

import jax

from jaxllm_kernels.dense.xla import RoundedXlaMatmul, XlaMatmul, XlaScaledMatmul


class Matmul(Protocol):
    """x [..., in] times weight [out, in], summed in float32: float32 [..., out].

    Implementations are static arguments of jitted functions, so they must be hashable: frozen
    dataclasses. They are traced by the caller.
    """

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array: ...


class ScaledMatmul(Protocol):
    """As `Matmul`, with a weight stored as codes [out, in], int8 or float8_e4m3fn, and scales.

    A weight is its code times the scale of its output and of its group of inputs: scales are
    float32 [out, groups], and groups have equal sizes. Codes are multiplied exactly as they are,
    in x's dtype, and scales multiply float32 sums.
    """

    def __call__(self, x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array: ...


XLA: Matmul = XlaMatmul()
XLA_SCALED: ScaledMatmul = XlaScaledMatmul()
ROUNDED_XLA: Matmul = RoundedXlaMatmul()
