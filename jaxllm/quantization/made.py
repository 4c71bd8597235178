"""Codes that are made of weights in more bits while these are read."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from jaxllm_kernels.coded import CodeForm

from jaxllm.models.checkpoint_map import Box, Rows, Shape, Source, Tensors

# The largest code of each type. That of int4 lies between 7 and its lowest code, -8.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "int4": 7.5}
# Weights that are held in float32 at a time.
_ELEMENTS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class AtLoad:
    """`Storage` of weights that the checkpoint has in 16 or 32 bits."""

    form: CodeForm
    source: Source | None = None  # the weight

    def fitted(self, num_inputs: int) -> "AtLoad":
        """The storage of a weight with so many inputs, which groups must divide."""
        if self.form.group is None:
            return self
        group = group_that_divides(num_inputs, self.form.group)
        return replace(self, form=replace(self.form, group=group))

    def codes(self, module: str, shape: Shape) -> Source:
        assert self.source is not None and self.source.shape == shape, module
        return Codes(self.source, self.form)

    def scales(self, module: str, shape: Shape) -> Source:
        assert self.source is not None and self.source.shape == shape, module
        return Scales(self.source, self.form)

    def offsets(self, module: str, shape: Shape) -> Source:
        raise AssertionError("codes are made without offsets")


def group_that_divides(num_inputs: int, most: int) -> int:
    """The largest group of inputs that divides them: of whole vectors if there is one."""
    sizes = [size for size in range(2, most + 1, 2) if num_inputs % size == 0]
    return max(sizes, key=lambda size: (size % 32 == 0, size), default=num_inputs)


@dataclass(frozen=True)
class Codes:
    """The codes [..., in] of weights."""

    source: Source
    form: CodeForm

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def rows(self) -> Iterator[Rows]:
        return self.source.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        *others, inputs = box
        group = self.form.group or self.source.shape[-1]
        # Whole groups, which decide the scale.
        span = slice(inputs.start // group * group, -(-inputs.stop // group) * group)
        kept = slice(inputs.start - span.start, inputs.stop - span.start)
        for place, weights in _pieces(self.source, tensors, tuple(others), span):
            grouped = weights.reshape(*weights.shape[:-1], -1, group)
            codes = grouped / _scales(grouped, self.form)[..., None]
            codes = codes.reshape(weights.shape)[..., kept]
            if self.form.codes == "int4":
                target[place] = np.rint(codes).clip(-8, 7) + 8
            elif self.form.codes == "int8":
                target[place] = np.rint(codes)
            else:
                target[place] = codes.astype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True)
class Scales:
    """The scales [..., groups] of weights. The largest weight of a group gets the largest code."""

    source: Source
    form: CodeForm

    @property
    def shape(self) -> Shape:
        *others, num_inputs = self.source.shape
        return (*others, self.form.num_groups(num_inputs))

    def rows(self) -> Iterator[Rows]:
        """None: the codes use the tensor's rows."""
        return iter(())

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        *others, groups = box
        group = self.form.group or self.source.shape[-1]
        span = slice(groups.start * group, groups.stop * group)
        for place, weights in _pieces(self.source, tensors, tuple(others), span):
            grouped = weights.reshape(*weights.shape[:-1], -1, group)
            target[place] = _scales(grouped, self.form)


def _scales(grouped: np.ndarray, form: CodeForm) -> np.ndarray:
    """The scales of groups [..., groups, inputs], in float32 as the form's type has them."""
    sizes = np.abs(grouped).max(axis=-1)
    scales = sizes / np.float32(LARGEST[form.codes])
    if form.scale_dtype == "bfloat16":
        scales = scales.astype(ml_dtypes.bfloat16).astype(np.float32)
    # A group of zeros has any scale.
    return np.where(scales > 0, scales, np.float32(1))


def _pieces(
    source: Source, tensors: Tensors, outputs: Box, inputs: slice
) -> Iterator[tuple[slice, np.ndarray]]:
    """Read a box in float32, a few rows of its first axis at a time; yield their place in it."""
    first_axis, *others = outputs
    sizes = [cut.stop - cut.start for cut in (*others, inputs)]
    step = max(1, _ELEMENTS_AT_ONCE // max(1, math.prod(sizes)))
    for first in range(first_axis.start, first_axis.stop, step):
        end = min(first + step, first_axis.stop)
        weights = np.empty((end - first, *sizes), np.float32)
        source.copy(tensors, (slice(first, end), *others, inputs), weights)
        yield slice(first - first_axis.start, end - first_axis.start), weights
