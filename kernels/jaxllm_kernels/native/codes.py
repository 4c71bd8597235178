"""Weights of codes as the library of native kernels takes them, in all of its ops."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxllm_kernels.coded import CodedWeight, CodeForm, NibbleOrder

# Of codes of 4 bits, a chunk of 128 inputs is 32 words of 16 bits. See `native/codes.h`.
_ORDER = NibbleOrder(per_word=4, stride=32)
# Sums of fewer inputs than these are not scaled.
_LEAST_GROUP = 16
# Rows are cut at multiples of it.
_STEP = 32


def held_natively(form: CodeForm, num_inputs: int) -> CodeForm:
    """The form in which the library takes such weights. Raises ValueError if it has no products
    with them."""
    step = _ORDER.block if form.bits == 4 else _STEP
    if num_inputs % step:
        raise ValueError(f"the {num_inputs} inputs on a device are no multiple of {step}")
    group = form.group or num_inputs
    is_power = group & (group - 1) == 0
    if group != num_inputs and not (is_power and group >= _LEAST_GROUP):
        raise ValueError(f"groups of {group} inputs are no power of two from {_LEAST_GROUP} on")
    return replace(form, scale_dtype="float32", order=_ORDER if form.bits == 4 else form.order)


def buffers(weight: CodedWeight) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The arguments of its functions for a weight: without offsets, their array is empty."""
    none = jnp.zeros((0,) * weight.scales.ndim, jnp.float32)
    return weight.codes, weight.scales, none if weight.offsets is None else weight.offsets
