"""Weights of codes for tests of every op: named forms, and random weights in them."""

import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from jaxllm_kernels.coded import CodedWeight, CodeForm, pack

FORMS: Mapping[str, CodeForm] = {
    "int8": CodeForm(codes="int8"),
    "int8, groups of 16": CodeForm(codes="int8", group=16),
    "int8, groups, offsets": CodeForm(codes="int8", group=32, has_offsets=True),
    "float8": CodeForm(codes="float8_e4m3fn"),
    "float8, groups": CodeForm(codes="float8_e4m3fn", group=32, scale_dtype="bfloat16"),
    "int4": CodeForm(codes="int4"),
    "int4, offsets": CodeForm(codes="int4", has_offsets=True, scale_dtype="float16"),
    "int4, groups, offsets": CodeForm(codes="int4", group=32, has_offsets=True),
    "mxfp4": CodeForm(codes="float4_e2m1fn", group=32, scale_dtype="float8_e8m0fnu"),
    "nvfp4": CodeForm(codes="float4_e2m1fn", group=16),
    "nf4": CodeForm(codes="nf4", group=32),
}


def random_weight(
    random: np.random.Generator, shape: tuple[int, ...], form: CodeForm, size: float = 1.0
) -> CodedWeight:
    """A weight [..., out, in] of all codes but those of NaN. Products with inputs of size 1 have
    about the given size."""
    *others, num_inputs = shape
    if form.bits == 4:
        codes = pack(random.integers(0, 16, shape, np.uint8), form.order)
        largest = 8.0
    else:
        codes = random.integers(0, 256, shape, np.uint8)
        if form.codes == "float8_e4m3fn":
            codes[codes & 0x7F == 0x7F] = 0
        codes = codes.view(form.code_dtype)
        largest = float(jnp.finfo(form.codes).max) if "float" in form.codes else 127.0
    groups = form.num_groups(num_inputs)
    unit = size / largest / math.sqrt(num_inputs)
    if form.scale_dtype == "float8_e8m0fnu":
        scales = 2.0 ** (random.integers(-2, 2, (*others, groups)) + round(math.log2(unit)))
    else:
        scales = unit * random.uniform(0.5, 2, (*others, groups))
    offsets = unit * largest * random.uniform(-1, 1, (*others, groups))
    return CodedWeight(
        codes=jnp.asarray(codes),
        scales=jnp.asarray(scales).astype(form.scale_dtype),
        offsets=jnp.asarray(offsets, form.offset_dtype) if form.has_offsets else None,
        form=form,
    )
