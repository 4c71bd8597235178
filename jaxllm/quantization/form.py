"""How the weight of a linear layer is stored: codes of 8 bits, and scales.

A weight is its code times a float32 scale, which it shares with other inputs of its output.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxllm.models.checkpoint_map import Shape, Source, Tensor, ViewedAs
from jaxllm.quantization.sources import LARGEST, Codes, Scales, Spread

CodeType = Literal["int8", "float8_e4m3fn"]


class Block(NamedTuple):
    """The weights that share a scale of a checkpoint; None: all outputs, or all inputs."""

    outputs: int | None
    inputs: int | None


@dataclass(frozen=True, kw_only=True)
class Form:
    """The stored form of a weight [out, in]."""

    codes: CodeType
    block: Block
    # The name of the scales in the checkpoint; None: the checkpoint has weights of 16 or 32 bits,
    # and codes are made when they are read.
    scale_name: str | None = None

    @property
    def group(self) -> int | None:
        """The inputs that share a scale; None: all."""
        return self.block.inputs

    def __str__(self) -> str:
        shared = "a scale per output" if self.group is None else f"a scale per {self.group} inputs"
        return f"{self.codes}, {shared}"


@dataclass(frozen=True)
class StoredCodes:
    """Where the codes of a weight are in a checkpoint."""

    form: Form

    @property
    def largest(self) -> float:
        """How large codes of made-up weights are: small enough for exact sums, and not all zero."""
        return min(LARGEST[self.form.codes], 127.0)

    def __call__(self, module: str, shape: Shape) -> Source:
        name, form = f"{module}.weight", self.form
        if form.scale_name is not None:
            return Tensor(name, shape, form.codes)
        return Codes(Tensor(name, shape), form.codes, form.group)


@dataclass(frozen=True)
class StoredScales:
    """Where the scales of a weight [out, in] are in a checkpoint; the parameter has them for each
    output, [out, groups]."""

    form: Form
    num_inputs: int

    @property
    def largest(self) -> float:
        return 0.05 / StoredCodes(self.form).largest

    def __call__(self, module: str, shape: Shape) -> Source:
        form, (outputs, groups) = self.form, shape
        if form.scale_name is None:
            weight = Tensor(f"{module}.weight", (outputs, self.num_inputs))
            return Scales(weight, form.codes, groups)
        name = f"{module}.{form.scale_name}"
        if form.block.outputs is None:
            return Spread(ViewedAs(Tensor(name, (groups,)), (1, groups)), outputs, outputs)
        rows = -(-outputs // form.block.outputs)
        return Spread(Tensor(name, (rows, groups)), form.block.outputs, outputs)
