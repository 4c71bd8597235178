"""Products within TPU kernels: rows with a block of weights, or of codes of 8 bits.

Codes are widened in registers. A sum over the inputs that share a scale is multiplied by it in
float32.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm_kernels.coded import CodeForm

# Lanes of a vector register. The minor dimension of every array is padded to a multiple.
LANES = 128

# Inputs whose codes are widened at a time. More would leave the registers.
WIDENED_INPUTS = 512


def check_codes(form: CodeForm, num_inputs: int) -> None:
    """Raise ValueError if `product` does not take codes of this form."""
    if form.bits != 8 or form.has_offsets:
        raise ValueError("of codes, it multiplies by those of 8 bits without offsets")
    if form.scale_dtype not in ("float32", "bfloat16"):
        raise ValueError(f"scales are {form.scale_dtype}, not float32 or bfloat16")
    group, num_groups = form.group or num_inputs, form.num_groups(num_inputs)
    if num_groups > 1 and group % LANES:
        raise ValueError(f"groups of {group} inputs are no multiple of {LANES}")
    # With fewer groups than lanes XLA keeps scales [outputs, groups] with the outputs last.
    if num_groups >= LANES or num_groups * group != num_inputs:
        raise ValueError(f"{num_inputs} inputs are not fewer than {LANES} groups of {group}")


def product(
    rows: jax.Array, weights: jax.Array, scales: jax.Array | None, is_turned: bool
) -> jax.Array:
    """Products of rows with weights, or with codes that have scales [groups, outputs]."""
    if scales is None:
        return _dot(rows, weights, is_turned)
    num_groups = len(scales)
    group = rows.shape[1] // num_groups
    products = []
    for index in range(num_groups):
        start, end = index * group, (index + 1) * group
        parts = []
        for first in range(start, end, WIDENED_INPUTS):
            here = slice(first, min(first + WIDENED_INPUTS, end))
            codes = weights[here] if is_turned else weights[:, here]
            parts.append(_dot(rows[:, here], codes.astype(rows.dtype), is_turned))
        products.append(sum(parts[1:], parts[0]) * scales[index : index + 1].astype(jnp.float32))
    return sum(products[1:], products[0])


def _dot(rows: jax.Array, weights: jax.Array, is_turned: bool) -> jax.Array:
    """Products of rows with weights, summed in float32."""
    is_wide = rows.dtype == jnp.float32
    return lax.dot_general(
        rows,
        weights,
        dimension_numbers=(((1,), (0 if is_turned else 1,)), ((), ())),
        precision=lax.Precision.HIGHEST if is_wide else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
