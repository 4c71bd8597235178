"""Sources that turn numbers of codes and scales into what an implementation holds."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
from jaxllm_kernels.coded import IN_ORDER, TABLES, NibbleOrder, pack

from jaxllm.errors import UnsupportedModelError
from jaxllm.models.checkpoint_map import Box, Rows, Shape, Source, Tensors
from jaxllm.quantization.unpacked import Nibbles


@dataclass(frozen=True)
class Packed:
    """Numbers of codes of 4 bits [..., in] as bytes [..., in / 2], in an order."""

    source: Source
    order: NibbleOrder

    @property
    def shape(self) -> Shape:
        *others, num_inputs = self.source.shape
        return (*others, num_inputs // 2)

    def rows(self) -> Iterator[Rows]:
        return self.source.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        if isinstance(self.source, Nibbles) and self.order == IN_ORDER:
            # The checkpoint has these bytes.
            self.source.source.copy(tensors, box, target)
            return
        *others, pairs = box
        # Whole blocks. Only devices that cut inputs read a part, and their parts have whole ones.
        inputs = slice(2 * pairs.start, 2 * pairs.stop)
        assert inputs.start % self.order.block == inputs.stop % self.order.block == 0, box
        numbers = np.empty((*target.shape[:-1], inputs.stop - inputs.start), np.uint8)
        self.source.copy(tensors, (*others, inputs), numbers)
        target[...] = pack(numbers, self.order)


@dataclass(frozen=True)
class Looked:
    """Codes of 8 bits in place of numbers of 4: those of a table."""

    source: Source
    table: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def rows(self) -> Iterator[Rows]:
        return self.source.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        numbers = np.empty(target.shape, np.uint8)
        self.source.copy(tensors, box, numbers)
        target[...] = np.array(self.table, np.int8)[numbers]


@dataclass(frozen=True)
class Times:
    """A source times a number."""

    source: Source
    factor: float

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def rows(self) -> Iterator[Rows]:
        return self.source.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        held = np.empty(target.shape, np.float32)
        self.source.copy(tensors, box, held)
        target[...] = held * np.float32(self.factor)


@dataclass(frozen=True)
class Regrouped:
    """What groups of inputs share [..., groups], for groups of which each has several."""

    source: Source
    each: int  # groups in a group of the source
    num_groups: int

    @property
    def shape(self) -> Shape:
        return (*self.source.shape[:-1], self.num_groups)

    def rows(self) -> Iterator[Rows]:
        return self.source.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        *others, groups = box
        first, end = groups.start // self.each, -(-groups.stop // self.each)
        held = np.empty((*target.shape[:-1], end - first), target.dtype)
        self.source.copy(tensors, (*others, slice(first, end)), held)
        target[...] = held[..., np.arange(groups.start, groups.stop) // self.each - first]


# float8_e4m3fn has the values of e2m1 times powers of two from 2 ** -8 to 2 ** 6.
_HIGHEST, _LOWEST = 6, -8


@dataclass(frozen=True)
class E4m3OfPowers:
    """Numbers of codes e2m1 [..., in] with powers of two [..., groups] for scales, as float8 with a
    scale for each output: the codes, or the scales [..., 1]. They have the same values."""

    numbers: Source
    powers: Source
    module: str
    gives: Literal["codes", "scales"]

    @property
    def shape(self) -> Shape:
        *others, num_inputs = self.numbers.shape
        return (*others, num_inputs if self.gives == "codes" else 1)

    def rows(self) -> Iterator[Rows]:
        return (self.numbers if self.gives == "codes" else self.powers).rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        *others, inputs = box
        num_inputs, num_groups = self.numbers.shape[-1], self.powers.shape[-1]
        numbers = np.empty((*target.shape[:-1], num_inputs), np.uint8)
        self.numbers.copy(tensors, (*others, slice(0, num_inputs)), numbers)
        powers = np.empty((*target.shape[:-1], num_groups), np.float32)
        self.powers.copy(tensors, (*others, slice(0, num_groups)), powers)
        each = num_inputs // num_groups
        exponents = np.frexp(powers)[1] - 1
        # Groups of zeros have any scale.
        is_used = (numbers.reshape(*powers.shape, each) & 7).any(-1)
        lowest = np.iinfo(np.int32).min // 2
        top = np.where(is_used, exponents, lowest).max(-1, keepdims=True)
        top = np.where(top == lowest, 0, top)
        if self.gives == "scales":
            target[...] = np.exp2((top - _HIGHEST).astype(np.float32))
            return
        shifts = np.where(is_used, exponents - top, 0) + _HIGHEST
        if (shifts < _LOWEST).any():
            raise UnsupportedModelError(
                f"the scales of an output of {self.module} differ by more than a factor of "
                f"2 ** {_HIGHEST - _LOWEST}, and float8 with a scale per output does not have "
                "their values; hold them in 4 bits, with quantization='mxfp4-groups'"
            )
        table = np.array(TABLES["float4_e2m1fn"], np.float32)
        columns = np.arange(inputs.start, inputs.stop)
        factors = np.exp2(shifts.astype(np.float32))[..., columns // each]
        target[...] = (table[numbers[..., columns]] * factors).astype(ml_dtypes.float8_e4m3fn)
