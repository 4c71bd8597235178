"""Sources of codes and scales, beside those of `jaxllm.models.checkpoint_map`."""

from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxllm.models.checkpoint_map import Box, Rows, Shape, Source, Tensors

# The largest code of each type.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
_DTYPES = {"int8": np.dtype(np.int8), "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn)}
# Weights that are held in float32 at a time.
_ELEMENTS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Spread:
    """Rows of scales [n, groups], each repeated for the outputs that share it."""

    source: Source
    each: int  # outputs of a row; the last one may have fewer
    num_outputs: int

    @property
    def shape(self) -> Shape:
        return (self.num_outputs, self.source.shape[1])

    def rows(self) -> Iterator[Rows]:
        return self.source.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        outputs, groups = box
        first, end = outputs.start // self.each, -(-outputs.stop // self.each)
        held = np.empty((end - first, target.shape[1]), target.dtype)
        self.source.copy(tensors, (slice(first, end), groups), held)
        target[...] = held[np.arange(outputs.start, outputs.stop) // self.each - first]


@dataclass(frozen=True)
class Codes:
    """The codes of weights [out, in] that the checkpoint has in more bits."""

    source: Source
    dtype: str
    group: int | None  # inputs that share a scale; None: all

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def rows(self) -> Iterator[Rows]:
        return self.source.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        num_inputs = self.source.shape[1]
        group = self.group or num_inputs
        inputs = box[1]
        # Whole groups, which decide the scale.
        span = slice(inputs.start // group * group, -(-inputs.stop // group) * group)
        for rows, weights in _pieces(self.source, tensors, box[0], span):
            scales = _scales(weights, self.dtype, weights.shape[1] // group)
            codes = weights / np.repeat(scales, group, axis=1)
            codes = codes[:, inputs.start - span.start : inputs.stop - span.start]
            if self.dtype == "int8":
                codes = np.rint(codes)
            target[rows] = codes.astype(_DTYPES[self.dtype])


@dataclass(frozen=True)
class Scales:
    """The scales [out, groups] of weights [out, in] that the checkpoint has in more bits. The
    largest weight of a group gets the largest code."""

    source: Source
    dtype: str
    groups: int

    @property
    def shape(self) -> Shape:
        return (self.source.shape[0], self.groups)

    def rows(self) -> Iterator[Rows]:
        """None: the codes use the tensor's rows."""
        return iter(())

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        group = self.source.shape[1] // self.groups
        span = slice(box[1].start * group, box[1].stop * group)
        for rows, weights in _pieces(self.source, tensors, box[0], span):
            target[rows] = _scales(weights, self.dtype, target.shape[1])


def _scales(weights: np.ndarray, dtype: str, groups: int) -> np.ndarray:
    sizes = np.abs(weights.reshape(len(weights), groups, -1)).max(axis=2)
    # A group of zeros has any scale.
    return np.where(sizes > 0, sizes / np.float32(LARGEST[dtype]), np.float32(1))


def _pieces(
    source: Source, tensors: Tensors, outputs: slice, inputs: slice
) -> Iterator[tuple[slice, np.ndarray]]:
    """Read a box in float32, a few rows at a time; yield their place in the box, too."""
    width = inputs.stop - inputs.start
    step = max(1, _ELEMENTS_AT_ONCE // max(1, width))
    for first in range(outputs.start, outputs.stop, step):
        end = min(first + step, outputs.stop)
        weights = np.empty((end - first, width), np.float32)
        source.copy(tensors, (slice(first, end), inputs), weights)
        yield slice(first - outputs.start, end - outputs.start), weights
