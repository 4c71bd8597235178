"""Matrix products by XLA."""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxllm_kernels.coded import IN_ORDER, CodedWeight, CodeForm, widen
from jaxllm_kernels.common import from_storage, to_storage


@dataclass(frozen=True)
class XlaMatmul:
    """`api.Matmul` on every platform."""

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        # By default accelerators multiply float32 with fewer bits, but a float32 model needs all.
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return jax.lax.dot_general(
            x,
            weight,
            (((x.ndim - 1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )


@dataclass(frozen=True)
class RoundedXlaMatmul:
    """`api.Matmul` for callers that round the product to x's dtype at once. XLA sees the product in
    that dtype.

    The sum is the same. If the product comes from a library (cuBLAS), this halves the bytes that go
    through memory, and XLA needs no kernel to round. If a sum goes over devices, each rounds its
    part. They exchange half the bytes, and XLA uses its faster all-reduce for a decode's few rows.
    """

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        if x.dtype == jnp.float32:
            return XlaMatmul()(x, weight)
        product = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
        return product.astype(jnp.float32)


# Inputs that are multiplied at a time, at least; and the most elements of a temporary array.
_INPUTS_AT_ONCE = 128
_MOST_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class XlaCodedMatmul:
    """`api.CodedMatmul` on every platform, for every form.

    Accelerators widen codes of 8 bits while they multiply. Everything else is widened some inputs
    at a time, one piece after the other, so that no copy of all weights is made.

    Inputs may be cut over `num_shards` devices, which then have whole groups: all devices take
    their first pieces, then their second ones.
    """

    num_shards: int = 1
    # Whether a product with codes of 8 bits widens them in registers. On CPUs it copies them.
    widens_in_place: bool = True
    name: str = "xla"

    def held(self, form: CodeForm, num_outputs: int, num_inputs: int) -> CodeForm:
        del num_outputs
        if num_inputs % (form.group or num_inputs):
            raise ValueError(f"groups of {form.group} do not divide {num_inputs} inputs")
        return replace(form, order=IN_ORDER)

    def __call__(self, x: jax.Array, weight: CodedWeight) -> jax.Array:
        form, num_groups = weight.form, weight.num_groups
        if form.bits == 8 and num_groups == 1 and self.widens_in_place:
            return _add_offsets(
                XlaMatmul()(x, weight.codes.astype(x.dtype))
                * weight.scales[:, 0].astype(jnp.float32),
                x[..., None, :],
                weight.offsets,
            )
        shards = self.num_shards
        if shards == 1 or num_groups % shards:
            return _sum_of_pieces(x, weight)
        # An axis of shards, so that the inputs of all devices are cut alike.
        x = x.reshape(*x.shape[:-1], shards, -1)
        cut = jax.tree.map(lambda array: array.reshape(len(array), shards, -1), weight)
        return jax.vmap(_sum_of_pieces, (-2, 1))(x, cut).sum(0)


def _sum_of_pieces(x: jax.Array, weight: CodedWeight) -> jax.Array:
    """Widen and multiply a piece of the inputs at a time."""
    num_outputs, num_inputs = weight.shape
    rows = math.prod(x.shape[:-1])
    group = num_inputs // weight.num_groups
    step = weight.form.order.block if weight.form.bits == 4 else 1
    size = _piece_size(num_inputs, group, step, rows, num_outputs)
    groups = max(1, size // group)  # in a piece
    per_code = 8 // weight.form.bits

    def add(piece: jax.Array, sums: jax.Array) -> jax.Array:
        def cut(array: jax.Array, size: int, start: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(array, start, size, axis=-1)

        inputs = cut(x, size, piece * size).reshape(*x.shape[:-1], groups, -1)
        # XLA:CPU has no parts of float8: it would widen all of them first.
        codes = cut(to_storage(weight.codes), size // per_code, piece * (size // per_code))
        codes = from_storage(codes, weight.form.code_dtype)
        wide = widen(codes, weight.form, x.dtype).reshape(num_outputs, groups, -1)
        first = piece * groups if size >= group else piece * size // group
        scales = cut(weight.scales, groups, first).astype(jnp.float32)
        products = jnp.einsum(
            "...gk,ogk->...go",
            inputs,
            wide,
            precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        sums = sums + (products * scales.T).sum(-2)
        offsets = None if weight.offsets is None else cut(weight.offsets, groups, first)
        return _add_offsets(sums, inputs, offsets)

    sums = jnp.zeros((*x.shape[:-1], num_outputs), jnp.float32)
    num_pieces = num_inputs // size
    return (
        add(jnp.int32(0), sums) if num_pieces == 1 else jax.lax.fori_loop(0, num_pieces, add, sums)
    )


def _add_offsets(sums: jax.Array, inputs: jax.Array, offsets: jax.Array | None) -> jax.Array:
    """Add offsets [out, groups] times the inputs [..., groups, k] that share them."""
    if offsets is None:
        return sums
    return sums + jax.lax.dot_general(
        inputs.astype(jnp.float32).sum(-1),
        offsets.astype(jnp.float32),
        (((inputs.ndim - 2,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
    )


def _piece_size(num_inputs: int, group: int, step: int, rows: int, outputs: int) -> int:
    """The inputs of a piece: whole groups or a part of one, and whole blocks of the order."""
    fits = max(1, _MOST_ELEMENTS // max(1, outputs))
    if group >= _INPUTS_AT_ONCE:
        # The largest part of a group that fits.
        parts = (n for n in range(1, group + 1) if group % n == 0 and group // n % step == 0)
        return next((group // n for n in parts if group // n <= fits), math.lcm(group, step))
    # Products of several groups at a time are all in memory.
    most = min(_INPUTS_AT_ONCE // group, max(1, _MOST_ELEMENTS // max(1, rows * outputs)))
    sizes = (n * group for n in range(most, 0, -1) if num_inputs % (n * group) == 0)
    return next((size for size in sizes if size % step == 0), math.lcm(group, step))
