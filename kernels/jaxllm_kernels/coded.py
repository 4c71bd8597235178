"""Weights that are stored as codes: one type for all ops that multiply by them.

A weight is the value of its code, times a scale that it shares with other inputs of its output,
plus perhaps an offset that it shares with the same ones.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The values of codes of 4 bits. Their names are those of types, where there is one. All but those
# of nf4 are exact in 16 bits.
TABLES: dict[str, tuple[float, ...]] = {
    "int4": tuple(float(code - 8) for code in range(16)),
    # A sign, two bits of exponent, one of mantissa.
    "float4_e2m1fn": (
        0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
    ),
    # The quantiles of normal numbers (QLoRA).
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NibbleOrder:
    """Where the codes of 4 bits of an output are in its bytes.

    Inputs are cut into blocks of `per_word * stride`. A block has `stride` words, little endian, of
    `per_word` codes each, the first one in the lowest bits. Code j of word l is that of input
    j * stride + l. The default is the inputs' own order, the first of two in the lower half of a
    byte.
    """

    per_word: int = 2  # even
    stride: int = 1

    @property
    def block(self) -> int:
        """Inputs must be a multiple of it, also those of a device."""
        return self.per_word * self.stride


IN_ORDER = NibbleOrder()


@dataclass(frozen=True, kw_only=True)
class CodeForm:
    """How a weight is stored; equal for all weights that are stored alike."""

    codes: str  # int8 and float8_e4m3fn have 8 bits, the names of TABLES 4
    group: int | None = None  # inputs that share a scale, and divide all inputs; None: all
    has_offsets: bool = False
    # The type of scales and offsets: float32, bfloat16 or float16; of scales also float8_e8m0fnu.
    scale_dtype: str = "float32"
    order: NibbleOrder = IN_ORDER  # of codes of 4 bits

    @property
    def bits(self) -> int:
        return 4 if self.codes in TABLES else 8

    @property
    def code_dtype(self) -> np.dtype:
        """The type of the array of codes."""
        return np.dtype(jnp.uint8 if self.bits == 4 else jnp.dtype(self.codes))

    @property
    def offset_dtype(self) -> np.dtype:
        powers = self.scale_dtype == "float8_e8m0fnu"
        return np.dtype(jnp.dtype("float32" if powers else self.scale_dtype))

    def num_groups(self, num_inputs: int) -> int:
        return num_inputs // (self.group or num_inputs)

    def __str__(self) -> str:
        shared = "output" if self.group is None else f"{self.group} inputs"
        return f"{self.codes}, a scale{' and an offset' if self.has_offsets else ''} per {shared}"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class CodedWeight:
    """A weight [..., out, in] as codes. A pytree, whose leaves have equal leading axes."""

    codes: jax.Array  # [..., out, in], or [..., out, in / 2] of uint8 with two codes in a byte
    scales: jax.Array  # [..., out, groups]
    offsets: jax.Array | None = None  # [..., out, groups]
    form: CodeForm = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        *others, last = self.codes.shape
        return (*others, last * 8 // self.form.bits)

    @property
    def num_groups(self) -> int:
        return self.scales.shape[-1]


def pack(numbers: Any, order: NibbleOrder) -> Any:
    """Numbers of codes below 16, [..., in], as bytes [..., in / 2]; of numpy or of JAX."""
    *others, num_inputs = numbers.shape
    blocks = numbers.reshape(*others, -1, order.per_word, order.stride).swapaxes(-1, -2)
    pairs = blocks.reshape(*others, num_inputs // 2, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack(packed: Any, order: NibbleOrder) -> Any:
    """The inverse of `pack`."""
    module: Any = jnp if isinstance(packed, jax.Array) else np
    *others, num_bytes = packed.shape
    pairs = module.stack([packed & 15, packed >> 4], axis=-1)
    blocks = pairs.reshape(*others, -1, order.stride, order.per_word).swapaxes(-1, -2)
    return blocks.reshape(*others, 2 * num_bytes)


def widen(codes: jax.Array, form: CodeForm, dtype: Any) -> jax.Array:
    """The values [..., in] of codes, without scales and offsets. `codes` may be a part of a weight
    that has whole blocks of the order."""
    if form.bits == 8:
        return codes.astype(dtype)
    numbers = unpack(codes, form.order)
    if form.codes == "int4":
        return (numbers.astype(jnp.int8) - 8).astype(dtype)
    if form.codes == "float4_e2m1fn":
        # Twice the value is a whole number.
        low = (numbers & 7).astype(jnp.int8)
        twice = jnp.where(low < 4, low, (2 + (low & 1)) << ((low >> 1) - 1).clip(0))
        signed = jnp.where(numbers > 7, -twice, twice)
        return (signed.astype(jnp.float32) * 0.5).astype(dtype)
    return jnp.asarray(TABLES[form.codes], dtype)[numbers]


def values(weight: CodedWeight) -> jax.Array:
    """What a weight stands for, in float32 [..., out, in]: the specification of products with it.
    It is a copy of the whole weight."""
    form, num_inputs = weight.form, weight.shape[-1]
    each = num_inputs // weight.num_groups
    dense = widen(weight.codes, form, jnp.float32)
    dense = dense * jnp.repeat(weight.scales.astype(jnp.float32), each, axis=-1)
    if weight.offsets is not None:
        dense = dense + jnp.repeat(weight.offsets.astype(jnp.float32), each, axis=-1)
    return dense
