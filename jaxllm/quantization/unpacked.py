"""Sources of numbers that a checkpoint has packed: several in a word."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxllm.errors import CheckpointError, UnsupportedModelError
from jaxllm.models.checkpoint_map import Box, Rows, Shape, Source, Tensor, Tensors


@dataclass(frozen=True)
class Nibbles:
    """The numbers [..., n] of bytes [..., n / 2], the first of two in the lower half."""

    source: Source

    @property
    def shape(self) -> Shape:
        *others, num_bytes = self.source.shape
        return (*others, 2 * num_bytes)

    def rows(self) -> Iterator[Rows]:
        return self.source.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        *others, inputs = box
        first, end = inputs.start // 2, -(-inputs.stop // 2)
        held = np.empty((*target.shape[:-1], end - first), np.uint8)
        self.source.copy(tensors, (*others, slice(first, end)), held)
        numbers = np.stack([held & 15, held >> 4], axis=-1).reshape(*held.shape[:-1], -1)
        target[...] = numbers[..., inputs.start - 2 * first : inputs.stop - 2 * first]


@dataclass(frozen=True)
class Unpacked:
    """The numbers of words of 32 bits. Along one of its two axes, a word has several."""

    words: Tensor
    shape: Shape
    axis: int
    bits: int
    # The place of each number of a word among its numbers, from the lowest bits on.
    places: tuple[int, ...]
    # Subtracted from numbers of 8 bits, which become signed.
    zero: int = 0

    def rows(self) -> Iterator[Rows]:
        return self.words.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        per_word, axis = 32 // self.bits, self.axis
        span = box[axis]
        first, end = span.start // per_word, -(-span.stop // per_word)
        of_words = [*box]
        of_words[axis] = slice(first, end)
        words = np.empty([cut.stop - cut.start for cut in of_words], np.int32)
        self.words.copy(tensors, tuple(of_words), words)
        mask = (1 << self.bits) - 1
        each = [(words >> self.bits * turn & mask).astype(np.uint8) for turn in range(per_word)]
        in_place = [each[self.places.index(place)] for place in range(per_word)]
        numbers = np.stack(in_place, axis=axis + 1)
        shape = list(words.shape)
        shape[axis] *= per_word
        cut = [slice(None)] * 2
        cut[axis] = slice(span.start - first * per_word, span.stop - first * per_word)
        numbers = numbers.reshape(shape)[tuple(cut)]
        target[...] = (numbers.astype(np.int16) - self.zero) if self.zero else numbers


def words_along(name: str, shape: Shape, axis: int, bits: int) -> Tensor:
    """The tensor with the words of numbers of this shape, which are packed along an axis."""
    sizes = list(shape)
    sizes[axis] = -(-sizes[axis] * bits // 32)
    return Tensor(name, tuple(sizes), "int32")


@dataclass(frozen=True)
class MinusZeros:
    """What values have beside code times scale: (base - zero) * scale, of zeros [out, groups]."""

    scales: Source
    zeros: Source
    base: int
    # Whether the checkpoint stores zeros less one, with the highest one for zero.
    less_one: bool = False
    bits: int = 4

    @property
    def shape(self) -> Shape:
        return self.scales.shape

    def rows(self) -> Iterator[Rows]:
        """Not those of the scales, which are a parameter of their own."""
        return self.zeros.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        scales = np.empty(target.shape, np.float32)
        self.scales.copy(tensors, box, scales)
        target[...] = (self.base - self.numbers(tensors, box)) * scales

    def numbers(self, tensors: Tensors, box: Box) -> np.ndarray:
        """The zeros, in float32."""
        zeros = np.empty([cut.stop - cut.start for cut in box], np.uint8)
        self.zeros.copy(tensors, box, zeros)
        if self.less_one:
            zeros = (zeros + 1) & ((1 << self.bits) - 1)
        return zeros.astype(np.float32)


@dataclass(frozen=True)
class WithZerosOf:
    """Scales of a checkpoint whose zeros are all the same, which is verified."""

    source: MinusZeros

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def rows(self) -> Iterator[Rows]:
        yield from self.source.scales.rows()
        yield from self.source.zeros.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        self.source.scales.copy(tensors, box, target)
        if (self.source.numbers(tensors, box) != self.source.base).any():
            name = next(self.source.zeros.rows()).tensor.name
            raise CheckpointError(
                f"tensor {name} has zeros other than {self.source.base}, and config.json says that "
                "the weights are symmetric"
            )


@dataclass(frozen=True)
class WithOrderOf:
    """Scales [out, groups] of inputs whose groups a tensor [in] tells. The groups must be in order:
    others would need activations in another order."""

    source: Source
    groups: Tensor

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def rows(self) -> Iterator[Rows]:
        yield from self.source.rows()
        yield from self.groups.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        (num_inputs,) = self.groups.shape
        groups = np.empty(num_inputs, np.int32)
        self.groups.copy(tensors, (slice(0, num_inputs),), groups)
        if (groups != np.arange(num_inputs) // (num_inputs // self.shape[1])).any():
            raise UnsupportedModelError(
                f"tensor {self.groups.name}: inputs are not in the order of their groups "
                "(desc_act), which is not supported"
            )
        self.source.copy(tensors, box, target)


@dataclass(frozen=True)
class TimesScalar:
    """Scales times, or divided by, one number of their module."""

    source: Source
    scalar: Tensor  # [1]
    divides: bool

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def rows(self) -> Iterator[Rows]:
        yield from self.source.rows()
        yield from self.scalar.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        scalar = np.empty(1, np.float32)
        self.scalar.copy(tensors, (slice(0, 1),), scalar)
        held = np.empty(target.shape, np.float32)
        self.source.copy(tensors, box, held)
        target[...] = held / scalar if self.divides else held * scalar
