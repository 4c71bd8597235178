"""The contract of products of activations with a weight, and the default implementation."""

from typing import Protocol

import jax

from jaxllm_kernels.coded import CodedWeight, CodeForm
from jaxllm_kernels.dense.xla import RoundedXlaMatmul, XlaCodedMatmul, XlaMatmul


class Matmul(Protocol):
    """x [..., in] times weight [out, in], summed in float32: float32 [..., out].

    Implementations are static arguments of jitted functions, so they must be hashable: frozen
    dataclasses. They are traced by the caller.
    """

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array: ...


class NoNeed(ValueError):
    """Says why a kernel leaves such weights to XLA, which loses nothing by it."""


class CodedMatmul(Protocol):
    """As `Matmul`, with a weight of codes, `jaxllm_kernels.coded`.

    Codes are multiplied exactly as they are, in x's dtype, if that has their values. Scales
    multiply float32 sums, and offsets the float32 sums of the inputs that share them.
    """

    @property
    def name(self) -> str:
        """For logs and reports."""
        ...

    def held(self, form: CodeForm, num_outputs: int, num_inputs: int) -> CodeForm:
        """The form in which it takes a weight [out, in] of a device that a checkpoint has in this
        form, with the same values: the order of codes and the type of scales may be others. It is
        asked before weights are read, and they are packed in this form when they are. Raises
        ValueError, which says why, if the implementation has no product with such weights, and
        NoNeed if another one is as fast.
        """
        ...

    def __call__(self, x: jax.Array, weight: CodedWeight) -> jax.Array: ...


XLA: Matmul = XlaMatmul()
XLA_CODED: CodedMatmul = XlaCodedMatmul()
ROUNDED_XLA: Matmul = RoundedXlaMatmul()
