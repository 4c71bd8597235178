"""Weights in the blocks of GGUF files: a scheme of one form for each matrix, and its storage.

A file has a type for each tensor, and q, k and v of one layer often have different ones. Fused,
they have one form that holds all of their values: codes of 8 bits where those of 4 do not suffice,
in the smaller groups, with offsets of zero where a type has none. Nothing is rounded.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxllm_kernels.coded import CodeForm

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.gguf.blocks import NAMES, TYPES
from jaxllm.models.checkpoint_map import Box, Rows, Shape, Source, Tensor, Tensors
from jaxllm.quantization.fields import FIELD, check_fields
from jaxllm.quantization.form import Storage
from jaxllm.quantization.scheme import Scheme

METHOD = "gguf"
Part = Literal["codes", "scales", "offsets"]
_CODED = {NAMES[kind]: its.codes for kind, its in TYPES.items() if its.codes is not None}
_EXPERTS = ".experts."


@runtime_checkable
class HasBlocks(Protocol):
    """An open file whose tensors are blocks."""

    def copy_part(
        self, name: str, box: tuple[slice, slice], target: np.ndarray, part: Part, form: Any
    ) -> None:
        """Fill the target with the codes, scales or offsets of a box of inputs, in a form."""
        ...


@dataclass(frozen=True)
class Blocks:
    """The storage of a matrix that has a form in common with others."""

    form: CodeForm

    def codes(self, module: str, shape: Shape) -> Source:
        return _OfBlocks(Tensor(f"{module}.weight", shape, "blocks"), self.form, "codes")

    def scales(self, module: str, shape: Shape) -> Source:
        return _OfBlocks(Tensor(f"{module}.weight", shape, "blocks"), self.form, "scales")

    def offsets(self, module: str, shape: Shape) -> Source:
        return _OfBlocks(Tensor(f"{module}.weight", shape, "blocks"), self.form, "offsets")


@dataclass(frozen=True)
class _OfBlocks:
    """The codes of a tensor, or what its groups share."""

    tensor: Tensor
    form: CodeForm
    part: Part

    @property
    def _each(self) -> int:
        """The inputs of an element of the last axis."""
        return 1 if self.part == "codes" else self.form.group or 1

    @property
    def shape(self) -> Shape:
        *others, num_inputs = self.tensor.shape
        return (*others, num_inputs // self._each)

    def rows(self) -> Iterator[Rows]:
        """The codes name the tensor."""
        return self.tensor.rows() if self.part == "codes" else iter(())

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        assert isinstance(tensors, HasBlocks), f"{self.tensor.name} is not in a GGUF file"
        outputs, last = box
        inputs = slice(last.start * self._each, last.stop * self._each)
        tensors.copy_part(self.tensor.name, (outputs, inputs), target, self.part, self.form)


@dataclass(frozen=True, kw_only=True)
class BlockScheme(Scheme):
    """The types of a file's matrices."""

    types: tuple[tuple[str, str], ...]  # module -> type

    def storage_of(self, modules: Sequence[tuple[str, ...]]) -> Storage | None:
        types = dict(self.types)
        names = [known[0] for known in modules]
        if _EXPERTS in names[0]:
            # Both matrices of the experts have one form.
            layer = names[0].partition(_EXPERTS)[0] + _EXPERTS
            names = [name for name in types if name.startswith(layer)] or names
        found = {types.get(name) for name in names}
        if found == {None}:
            return None
        coded = sorted(kind for kind in found if kind is not None)
        if len(coded) < len(found):
            raise UnsupportedModelError(
                f"the GGUF file has {names[0]} and what is fused with it partly as "
                f"{' and '.join(coded)} and partly as floats, which is not supported"
            )
        return Blocks(_common_form(coded))

    def __str__(self) -> str:
        return f"{self.method} ({', '.join(sorted({kind for _, kind in self.types}))})"


def _common_form(types: Sequence[str]) -> CodeForm:
    """A form that has the values of all of these types."""
    codes = [_CODED[kind] for kind in types]
    kinds = {its.kind for its in codes}
    return CodeForm(
        codes=kinds.pop() if len(kinds) == 1 else "int8",
        group=math.gcd(*(its.group for its in codes)),
        has_offsets=any(its.has_offsets for its in codes),
    )


def read_gguf(config: Mapping[str, Any]) -> Scheme:
    """Read what `jaxllm.gguf.directory` writes."""
    check_fields(config, {"quant_method", "types"})
    types = config.get("types")
    if not isinstance(types, Mapping):
        raise CheckpointError(f"config.json: {FIELD}.types={shown(types)} must be an object")
    found = []
    for kind, modules in types.items():
        if kind not in _CODED or not isinstance(modules, list):
            raise UnsupportedModelError(
                f"{FIELD}.types has {shown(kind)}; supported are {', '.join(_CODED)}"
            )
        found += [(str(module), kind) for module in modules]
    return BlockScheme(method=METHOD, storages=(), types=tuple(sorted(found)))
