"""The types of GGUF's tensors: blocks of numbers along the last axis, and what their bytes say.

A value is code * scale + offset, in float32. The codes of a block and its scales are exact: nothing
is rounded here. A group is the numbers of a block with one scale.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np

Bytes = np.ndarray  # uint8 [blocks, bytes of a block]


class Decoded(NamedTuple):
    """The numbers of blocks."""

    codes: np.ndarray  # int8, or uint8 0 to 15 of four bits: [blocks, size]
    scales: np.ndarray  # float32 [blocks, groups]
    offsets: np.ndarray | None = None  # float32 [blocks, groups]


@dataclass(frozen=True, kw_only=True)
class Codes:
    """What the blocks of a type have: the kind of their codes, and how many share a scale."""

    kind: str  # "int8"; "int4", 0 to 15 for -8 to 7; "float4_e2m1fn", the bits of such a number
    group: int
    has_offsets: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockType:
    """A type of blocks."""

    size: int  # numbers of a block
    num_bytes: int
    codes: Codes | None = None  # None: its numbers are floats
    decode: Callable[[Bytes], Decoded] | None = None
    dtype: np.dtype | None = None  # of floats


def _float16(data: Bytes, at: int) -> np.ndarray:
    """A float16 of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(data[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(data: Bytes) -> np.ndarray:
    """All low nibbles of some bytes of each block, then the high ones."""
    return np.concatenate([data & 15, data >> 4], axis=1)


def _high_bits(data: Bytes, at: int) -> np.ndarray:
    """32 bits of each block, the lowest first: [blocks, 32]."""
    return np.unpackbits(data[:, at : at + 4], axis=1, bitorder="little")


# Blocks of 32 numbers.


def _q4_0(data: Bytes) -> Decoded:
    return Decoded(_nibbles(data[:, 2:]), _float16(data, 0))


def _q4_1(data: Bytes) -> Decoded:
    scales = _float16(data, 0)
    return Decoded(_nibbles(data[:, 4:]), scales, _float16(data, 2) + 8 * scales)


def _q5_0(data: Bytes) -> Decoded:
    codes = (_nibbles(data[:, 6:]) | _high_bits(data, 2) << 4).astype(np.int8) - 16
    return Decoded(codes, _float16(data, 0))


def _q5_1(data: Bytes) -> Decoded:
    codes = (_nibbles(data[:, 8:]) | _high_bits(data, 4) << 4).astype(np.int8)
    return Decoded(codes, _float16(data, 0), _float16(data, 2))


def _q8_0(data: Bytes) -> Decoded:
    return Decoded(data[:, 2:].view(np.int8), _float16(data, 0))


_NON_LINEAR = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


def _iq4_nl(data: Bytes) -> Decoded:
    return Decoded(_NON_LINEAR[_nibbles(data[:, 2:])], _float16(data, 0))


def _mxfp4(data: Bytes) -> Decoded:
    exponents = data[:, :1].view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return Decoded(_nibbles(data[:, 1:]), exponents)


# Blocks of 256 numbers. Bits of a number that are above the lowest are apart, in bytes of several.


def _scales_and_offsets(data: Bytes, at: int) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and offsets, from numbers of 6 bits in 12 bytes behind two float16."""
    packed = data[:, at : at + 12].astype(np.int32)
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)
    mins = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1)
    return _float16(data, 0) * scales, -_float16(data, 2) * mins


def _halves(data: Bytes, width: int) -> np.ndarray:
    """The low nibbles of each `width` bytes, then the high ones, then the next bytes'."""
    pieces = data.reshape(len(data), -1, 1, width)
    return np.concatenate([pieces & 15, pieces >> 4], axis=2).reshape(len(data), -1)


def _pairs(data: Bytes) -> np.ndarray:
    """Numbers of two bits: the lowest ones of each 32 bytes, then the next, and so on."""
    pieces = data.reshape(len(data), -1, 1, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (pieces >> shifts & 3).reshape(len(data), -1)


def _q2_k(data: Bytes) -> Decoded:
    scales = _float16(data, 80) * (data[:, :16] & 15)
    offsets = -_float16(data, 82) * (data[:, :16] >> 4)
    return Decoded(_pairs(data[:, 16:80]), scales, offsets + 8 * scales)


def _q3_k(data: Bytes) -> Decoded:
    packed = data[:, 96:108]
    high = packed[:, 8:12]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    top = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales = _float16(data, 108) * ((low | top << 4).astype(np.int32) - 32)
    # A set bit means that nothing is subtracted.
    bits = data[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _pairs(data[:, 32:96]) + (bits.reshape(len(data), -1) << 2) + 4
    return Decoded(codes, scales)


def _q4_k(data: Bytes) -> Decoded:
    scales, offsets = _scales_and_offsets(data, 4)
    return Decoded(_halves(data[:, 16:], 32), scales, offsets + 8 * scales)


def _q5_k(data: Bytes) -> Decoded:
    scales, offsets = _scales_and_offsets(data, 4)
    bits = data[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _halves(data[:, 48:], 32) | bits.reshape(len(data), -1) << 4
    return Decoded(codes.astype(np.int8), scales, offsets)


def _q6_k(data: Bytes) -> Decoded:
    scales = _float16(data, 208) * data[:, 192:208].view(np.int8)
    codes = _halves(data[:, :128], 64) | _pairs(data[:, 128:192]) << 4
    return Decoded(codes.astype(np.int8) - 32, scales)


def _iq4_xs(data: Bytes) -> Decoded:
    high = np.ascontiguousarray(data[:, 2:4]).view("<u2").astype(np.int32)
    low = np.stack([data[:, 4:8] & 15, data[:, 4:8] >> 4], axis=2).reshape(len(data), 8)
    top = high >> np.arange(0, 16, 2) & 3
    scales = _float16(data, 0) * ((low | top << 4) - 32)
    return Decoded(_NON_LINEAR[_halves(data[:, 8:], 16)], scales)


def _floats(dtype: str | type) -> BlockType:
    kind = np.dtype(dtype)
    return BlockType(size=1, num_bytes=kind.itemsize, dtype=kind)


def _type(
    size: int,
    num_bytes: int,
    decode: Callable[[Bytes], Decoded],
    kind: str,
    group: int = 32,
    *,
    has_offsets: bool = False,
) -> BlockType:
    codes = Codes(kind=kind, group=group, has_offsets=has_offsets)
    return BlockType(size=size, num_bytes=num_bytes, codes=codes, decode=decode)


# By their numbers in files.
TYPES: dict[int, BlockType] = {
    0: _floats("<f4"),
    1: _floats("<f2"),
    2: _type(32, 18, _q4_0, "int4"),
    3: _type(32, 20, _q4_1, "int4", has_offsets=True),
    6: _type(32, 22, _q5_0, "int8"),
    7: _type(32, 24, _q5_1, "int8", has_offsets=True),
    8: _type(32, 34, _q8_0, "int8"),
    10: _type(256, 84, _q2_k, "int4", 16, has_offsets=True),
    11: _type(256, 110, _q3_k, "int4", 16),
    12: _type(256, 144, _q4_k, "int4", has_offsets=True),
    13: _type(256, 176, _q5_k, "int8", has_offsets=True),
    14: _type(256, 210, _q6_k, "int8", 16),
    20: _type(32, 18, _iq4_nl, "int8"),
    23: _type(256, 136, _iq4_xs, "int8"),
    30: _floats(ml_dtypes.bfloat16),
    39: _type(32, 17, _mxfp4, "float4_e2m1fn"),
}

# The names of all numbers, also of types that are not read.
NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

# What the four bits of a code mean.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
TABLES = {
    "int4": np.arange(-8, 8, dtype=np.float32),
    "float4_e2m1fn": np.concatenate([_E2M1, -_E2M1]),
}


def values(decoded: Decoded, codes: Codes) -> np.ndarray:
    """The values of blocks, float32 [blocks, size]."""
    table = TABLES.get(codes.kind)
    numbers = decoded.codes.astype(np.float32) if table is None else table[decoded.codes]
    grouped = numbers.reshape(*decoded.scales.shape, codes.group) * decoded.scales[..., None]
    if decoded.offsets is not None:
        grouped = grouped + decoded.offsets[..., None]
    return grouped.reshape(len(numbers), -1)
