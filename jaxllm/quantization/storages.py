"""The storages of safetensors checkpoints: where tensors of each format are, and what they say."""

from dataclasses import dataclass

from jaxllm_kernels.coded import CodeForm

from jaxllm.errors import UnsupportedModelError
from jaxllm.models.checkpoint_map import Kind, Shape, Source, Tensor, Transposed, ViewedAs
from jaxllm.quantization.held import Times
from jaxllm.quantization.sources import Spread
from jaxllm.quantization.unpacked import (
    MinusZeros,
    Nibbles,
    TimesScalar,
    Unpacked,
    WithOrderOf,
    WithZerosOf,
    words_along,
)

IN_WORDS = tuple(range(8))
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)


def matrix(module: str, shape: Shape) -> tuple[int, int]:
    """The sizes of the weight of one module. Formats say how one matrix is stored."""
    if len(shape) != 2:
        raise UnsupportedModelError(
            f"{module} has all experts in one tensor, which is not supported in this format"
        )
    return shape


class _NoOffsets:
    def offsets(self, module: str, shape: Shape) -> Source:
        raise AssertionError(f"{module}: this form has no offsets")


@dataclass(frozen=True, kw_only=True)
class Bytes(_NoOffsets):
    """Codes of 8 bits with a scale for each tensor, output, or block of both."""

    form: CodeForm
    # Outputs that share scales; None: all.
    outputs: int | None
    scale_name: str = "weight_scale"
    # The shape of scales if each output has one: [out, 1], or [out].
    is_row: bool = False
    factor: float = 1.0

    def codes(self, module: str, shape: Shape) -> Source:
        kind: Kind = "int8" if self.form.codes == "int8" else "float8_e4m3fn"
        return Tensor(f"{module}.weight", matrix(module, shape), kind)

    def scales(self, module: str, shape: Shape) -> Source:
        scales = self._scales(module, shape)
        return scales if self.factor == 1.0 else Times(scales, self.factor)

    def _scales(self, module: str, shape: Shape) -> Source:
        num_outputs, num_inputs = matrix(module, shape)
        name = f"{module}.{self.scale_name}"
        groups = -(-num_inputs // (self.form.group or num_inputs))
        if self.outputs is None:
            one = ViewedAs(Tensor(name, (groups,), "scale"), (1, groups))
            return Spread(one, num_outputs, num_outputs)
        if self.is_row:
            return ViewedAs(Tensor(name, (num_outputs,), "scale"), (num_outputs, 1))
        rows = -(-num_outputs // self.outputs)
        blocks = Tensor(name, (rows, groups), "scale")
        return blocks if self.outputs == 1 else Spread(blocks, self.outputs, num_outputs)


@dataclass(frozen=True, kw_only=True)
class PackQuantized:
    """compressed-tensors' `pack-quantized`: codes of 4 or 8 bits in words, along the inputs; zeros
    likewise, along the outputs. To both, half of the codes' number is added."""

    form: CodeForm

    @property
    def _bits(self) -> int:
        return self.form.bits

    def codes(self, module: str, shape: Shape) -> Source:
        shape = matrix(module, shape)
        words = words_along(f"{module}.weight_packed", shape, 1, self._bits)
        zero = 0 if self._bits == 4 else 128
        return Unpacked(words, shape, 1, self._bits, IN_WORDS[: 32 // self._bits], zero)

    def scales(self, module: str, shape: Shape) -> Source:
        return Tensor(f"{module}.weight_scale", self._of_groups(module, shape), "scale")

    def offsets(self, module: str, shape: Shape) -> Source:
        groups = self._of_groups(module, shape)
        words = words_along(f"{module}.weight_zero_point", groups, 0, self._bits)
        zeros = Unpacked(words, groups, 0, self._bits, IN_WORDS[: 32 // self._bits])
        return MinusZeros(self.scales(module, shape), zeros, 1 << (self._bits - 1))

    def _of_groups(self, module: str, shape: Shape) -> Shape:
        num_outputs, num_inputs = matrix(module, shape)
        return num_outputs, num_inputs // (self.form.group or num_inputs)


@dataclass(frozen=True, kw_only=True)
class PackedFloat4(_NoOffsets):
    """Codes e2m1, two in a byte, and a scale for each group: a power of two (mxfp4), or a float8
    and one more number for the module (nvfp4)."""

    form: CodeForm
    codes_name: str = "weight_packed"
    # The name of the module's number, and whether it divides.
    scalar_name: str | None = None
    divides: bool = True

    def codes(self, module: str, shape: Shape) -> Source:
        num_outputs, num_inputs = matrix(module, shape)
        name = f"{module}.{self.codes_name}"
        return Nibbles(Tensor(name, (num_outputs, num_inputs // 2), "uint8"))

    def scales(self, module: str, shape: Shape) -> Source:
        num_outputs, num_inputs = matrix(module, shape)
        assert self.form.group is not None
        sizes = (num_outputs, num_inputs // self.form.group)
        kind = "power" if self.scalar_name is None else "scale"
        scales = Tensor(f"{module}.weight_scale", sizes, kind)
        if self.scalar_name is None:
            return scales
        return TimesScalar(scales, Tensor(f"{module}.{self.scalar_name}", (1,)), self.divides)


@dataclass(frozen=True, kw_only=True)
class GptOss(_NoOffsets):
    """gpt-oss as released: mxfp4, with two tensors for the weights of all experts of a layer."""

    form: CodeForm = CodeForm(codes="float4_e2m1fn", group=32, scale_dtype="float8_e8m0fnu")

    def codes(self, module: str, shape: Shape) -> Source:
        experts, num_outputs, num_inputs = self._sizes(module, shape)
        blocks = (experts, num_outputs, num_inputs // 32, 16)
        in_bytes = (experts, num_outputs, num_inputs // 2)
        return Nibbles(ViewedAs(Tensor(f"{module}_blocks", blocks, "uint8"), in_bytes))

    def scales(self, module: str, shape: Shape) -> Source:
        experts, num_outputs, num_inputs = self._sizes(module, shape)
        return Tensor(f"{module}_scales", (experts, num_outputs, num_inputs // 32), "power")

    def _sizes(self, module: str, shape: Shape) -> Shape:
        if len(shape) != 3:
            raise UnsupportedModelError(
                f"{module}: mxfp4 is supported for experts in one tensor, as gpt-oss has them"
            )
        return shape


@dataclass(frozen=True, kw_only=True)
class Awq:
    """AWQ in the order of its product ("gemm"): codes [in, out] in words along the outputs."""

    form: CodeForm

    def codes(self, module: str, shape: Shape) -> Source:
        num_outputs, num_inputs = matrix(module, shape)
        return self._turned(f"{module}.qweight", num_inputs, num_outputs)

    def scales(self, module: str, shape: Shape) -> Source:
        return Transposed(self._scales(module, shape))

    def offsets(self, module: str, shape: Shape) -> Source:
        scales = self._scales(module, shape)
        zeros = self._turned(f"{module}.qzeros", *scales.shape)
        return MinusZeros(Transposed(scales), zeros, 8)

    def _scales(self, module: str, shape: Shape) -> Tensor:
        num_outputs, num_inputs = matrix(module, shape)
        groups = num_inputs // (self.form.group or num_inputs)
        return Tensor(f"{module}.scales", (groups, num_outputs), "scale")

    def _turned(self, name: str, rows: int, num_outputs: int) -> Source:
        numbers = (rows, num_outputs)
        return Transposed(Unpacked(words_along(name, numbers, 1, 4), numbers, 1, 4, AWQ_PLACES))


@dataclass(frozen=True, kw_only=True)
class Gptq:
    """GPTQ: codes [in, out] in words along the inputs, and zeros [groups, out] along the outputs.
    The first version stores zeros less one."""

    form: CodeForm
    less_one: bool

    def codes(self, module: str, shape: Shape) -> Source:
        num_outputs, num_inputs = matrix(module, shape)
        bits, numbers = self.form.bits, (num_inputs, num_outputs)
        words = words_along(f"{module}.qweight", numbers, 0, bits)
        zero = 0 if bits == 4 else 128
        return Transposed(Unpacked(words, numbers, 0, bits, IN_WORDS[: 32 // bits], zero))

    def scales(self, module: str, shape: Shape) -> Source:
        num_inputs = shape[-1]
        scales: Source = self._scales(module, shape)
        if not self.form.has_offsets:
            scales = WithZerosOf(self._minus_zeros(module, shape))
        return WithOrderOf(scales, Tensor(f"{module}.g_idx", (num_inputs,), "int32"))

    def offsets(self, module: str, shape: Shape) -> Source:
        return self._minus_zeros(module, shape)

    def _scales(self, module: str, shape: Shape) -> Source:
        return Transposed(Tensor(f"{module}.scales", self._of_groups(module, shape), "scale"))

    def _minus_zeros(self, module: str, shape: Shape) -> MinusZeros:
        bits, numbers = self.form.bits, self._of_groups(module, shape)
        words = words_along(f"{module}.qzeros", numbers, 1, bits)
        zeros = Transposed(Unpacked(words, numbers, 1, bits, IN_WORDS[: 32 // bits]))
        return MinusZeros(self._scales(module, shape), zeros, 1 << (bits - 1), self.less_one, bits)

    def _of_groups(self, module: str, shape: Shape) -> tuple[int, int]:
        num_outputs, num_inputs = matrix(module, shape)
        return num_inputs // (self.form.group or num_inputs), num_outputs
