"""How a checkpoint stores the weights of a layer, and where a model's arrays of codes are in it.

A `Storage` knows one module of a checkpoint at a time, and gives its codes as numbers. What is done
with them is the same for all: they are packed in the form in which the chosen implementation holds
them, fused with those of other modules, and cut over devices.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from jaxllm_kernels.coded import TABLES, CodeForm

from jaxllm.models.checkpoint_map import Shape, Source
from jaxllm.quantization.held import E4m3OfPowers, Looked, Packed, Regrouped, Times
from jaxllm.quantization.made import AtLoad
from jaxllm.quantization.sources import Values


class Storage(Protocol):
    """A way to store a weight [..., out, in], as codes. Implementations are frozen dataclasses."""

    @property
    def form(self) -> CodeForm:
        """The form, of which the order of codes does not matter."""
        ...

    def codes(self, module: str, shape: Shape) -> Source:
        """The numbers of codes, one an element: of 4 bits uint8 from 0 to 15, of 8 bits their type.

        Args:
          module: the full name of the module, without that of a tensor.
          shape: of the weight.
        """
        ...

    def scales(self, module: str, shape: Shape) -> Source:
        """The scales [..., out, groups] of a weight of this shape [..., out, in]."""
        ...

    def offsets(self, module: str, shape: Shape) -> Source:
        """Likewise, if the form has offsets."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Held:
    """An array of a weight that is held in a form with the same values as that of its storage."""

    storage: Storage
    held: CodeForm
    num_inputs: int
    # The leaf of the parameter whose values become codes while they are read; None: the checkpoint
    # has codes.
    floats: str | None = None

    def of_floats(self, weight: Source) -> Source:
        """The source of a parameter that is made of a weight in more bits."""
        assert isinstance(self.storage, AtLoad)
        made = replace(self, storage=replace(self.storage, source=weight))
        return made("", weight.shape)

    def __call__(self, module: str, shape: Shape) -> Source:
        return self.source(module, (*shape[:-1], self.num_inputs))

    def source(self, module: str, shape: Shape) -> Source:
        """The source for a weight [..., out, in] of this shape."""
        raise NotImplementedError

    @property
    def becomes_float8(self) -> bool:
        """Whether codes of 4 bits and powers of two become float8 with a scale per output."""
        return self.storage.form.bits == 4 and self.held.codes == "float8_e4m3fn"

    def regrouped(self, source: Source) -> Source:
        """What groups share, for the groups of the form that is held."""
        group = self.storage.form.group
        if group is None or group == self.held.group:
            return source
        assert self.held.group is not None
        return Regrouped(source, group // self.held.group, self.held.num_groups(self.num_inputs))


@dataclass(frozen=True, kw_only=True)
class HeldCodes(_Held):
    """`Stored` of codes."""

    @property
    def largest(self) -> float:
        """How large codes of made-up weights are: small enough for exact sums, and not all zero."""
        return _LARGEST_MADE_UP

    def source(self, module: str, shape: Shape) -> Source:
        numbers, held = self.storage.codes(module, shape), self.held
        if self.becomes_float8:
            return E4m3OfPowers(numbers, self.storage.scales(module, shape), module, "codes")
        if held.bits == 4:
            return Packed(numbers, held.order)
        if self.storage.form.bits == 4:
            twice = 2 * np.array(TABLES[self.storage.form.codes])
            return Looked(numbers, tuple(twice.astype(int).tolist()))
        return numbers


@dataclass(frozen=True, kw_only=True)
class HeldScales(_Held):
    """`Stored` of scales."""

    @property
    def largest(self) -> float:
        return 0.05 / (8 if self.held.bits == 4 else _LARGEST_MADE_UP)

    def source(self, module: str, shape: Shape) -> Source:
        scales = self.storage.scales(module, shape)
        if self.becomes_float8:
            return E4m3OfPowers(self.storage.codes(module, shape), scales, module, "scales")
        if self.storage.form.bits == 4 and self.held.codes == "int8":
            scales = Times(scales, 0.5)
        return self.regrouped(scales)


@dataclass(frozen=True, kw_only=True)
class HeldOffsets(_Held):
    """`Stored` of offsets."""

    largest: float = 0.01

    def source(self, module: str, shape: Shape) -> Source:
        return self.regrouped(self.storage.offsets(module, shape))


@dataclass(frozen=True, kw_only=True)
class HeldValues:
    """`Stored` of weights that are no codes on devices: computations want them in another shape."""

    storage: Storage
    largest: float = 0.05
    floats: str | None = None

    def __call__(self, module: str, shape: Shape) -> Source:
        storage = self.storage
        offsets = storage.offsets(module, shape) if storage.form.has_offsets else None
        codes, scales = storage.codes(module, shape), storage.scales(module, shape)
        return Values(storage.form, codes, scales, offsets)


_LARGEST_MADE_UP = 127.0
