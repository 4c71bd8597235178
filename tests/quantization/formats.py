"""Writers of the formats of checkpoints, each after the sources of those who write it: tensors of a
module's weight [out, in] of random codes, and the values that they stand for, in float64."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
Made = tuple[dict[str, np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Format:
    """What config.json says, and the writer of a module."""

    config: Mapping[str, Any]
    write: Callable[[np.random.Generator, int, int], Made]  # (random, outputs, inputs)


def spread(grouped: np.ndarray, size: int) -> np.ndarray:
    return np.repeat(grouped.astype(np.float64), size // grouped.shape[1], axis=1)


def words(numbers: np.ndarray, axis: int, bits: int, places: Any = None) -> np.ndarray:
    """Pack numbers in words of 32 bits along an axis, with zeros at the end."""
    per_word = 32 // bits
    numbers = np.moveaxis(numbers, axis, -1).astype(np.uint32)
    numbers = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per_word)))
    numbers = numbers.reshape(len(numbers), -1, per_word)
    packed = np.zeros(numbers.shape[:2], np.uint32)
    for turn, place in enumerate(places or range(per_word)):
        packed |= numbers[..., place] << np.uint32(bits * turn)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32)


def _scales(random: np.random.Generator, outputs: int, groups: int, dtype: Any) -> np.ndarray:
    return (random.uniform(0.5, 2, (outputs, groups)) / 64).astype(dtype)


def pack_quantized(bits: int, group: int | None, *, symmetric: bool = True) -> Format:
    weights = {
        "num_bits": bits,
        "type": "int",
        "strategy": "group" if group else "channel",
        "group_size": group,
        "symmetric": symmetric,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }

    def write(random: np.random.Generator, outputs: int, inputs: int) -> Made:
        half = 1 << (bits - 1)
        groups = inputs // (group or inputs)
        numbers = random.integers(0, 2 * half, (outputs, inputs))
        zeros = random.integers(0, 2 * half, (outputs, groups)) if not symmetric else half
        scales = _scales(random, outputs, groups, ml_dtypes.bfloat16) * (8 / half)
        scales = scales.astype(ml_dtypes.bfloat16)
        tensors = {
            "weight_packed": words(numbers, 1, bits),
            "weight_scale": scales,
            "weight_shape": np.array([outputs, inputs]),
        }
        offset: Any = half
        if not symmetric:
            tensors["weight_zero_point"] = words(np.asarray(zeros), 0, bits)
            offset = spread(np.asarray(zeros), inputs)
        return tensors, (numbers - offset) * spread(scales, inputs)

    return Format(config=_compressed("pack-quantized", weights), write=write)


def _compressed(kind: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*router.*"],
        "quantization_status": "compressed",
    }


def _float4(kind: str) -> Format:
    is_mx = kind == "mx"
    group = 32 if is_mx else 16
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group" if is_mx else "tensor_group",
        "group_size": group,
        "symmetric": True,
        "dynamic": False,
    }

    def write(random: np.random.Generator, outputs: int, inputs: int) -> Made:
        numbers = random.integers(0, 16, (outputs, inputs), np.uint8)
        tensors = {"weight_packed": numbers[:, ::2] | numbers[:, 1::2] << 4}
        groups = (outputs, inputs // group)
        if is_mx:
            exponents = random.integers(119, 125, groups, np.uint8)
            scales = 2.0 ** (exponents.astype(np.float64) - 127)
            tensors["weight_scale"] = exponents
        else:
            small = random.uniform(0.5, 448, groups).astype(ml_dtypes.float8_e4m3fn)
            whole = np.array([3000.5], np.float32)
            scales = small.astype(np.float64) / whole
            tensors |= {"weight_scale": small, "weight_global_scale": whole}
            tensors["input_global_scale"] = np.ones(1, np.float32)
        return tensors, E2M1[numbers] * spread(scales, inputs)

    return Format(config=_compressed(f"{kind}fp4-pack-quantized", weights), write=write)


def _modelopt(algorithm: str) -> Format:
    def write(random: np.random.Generator, outputs: int, inputs: int) -> Made:
        if algorithm == "FP8":
            codes = random.standard_normal((outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
            scale = np.array(0.03, np.float32)
            tensors = {"weight": codes, "weight_scale": scale, "input_scale": np.float32([1.0])}
            return tensors, codes.astype(np.float64) * float(scale)
        tensors, _ = _float4("nv").write(random, outputs, inputs)
        tensors["weight"] = tensors.pop("weight_packed")
        del tensors["weight_global_scale"], tensors["input_global_scale"]
        tensors["weight_scale_2"] = scale = np.array(1 / 2000, np.float32)
        low, high = tensors["weight"] & 15, tensors["weight"] >> 4
        numbers = np.stack([low, high], -1).reshape(outputs, inputs)
        scales = tensors["weight_scale"].astype(np.float64) * float(scale)
        return tensors, E2M1[numbers] * spread(scales, inputs)

    config = {"quant_method": "modelopt", "quant_algo": algorithm, "exclude_modules": ["lm_head"]}
    config |= {"ignore": ["*.mlp.gate*"], "producer": {"name": "modelopt"}}
    return Format(config=config, write=write)


def _awq(group: int) -> Format:
    def write(random: np.random.Generator, outputs: int, inputs: int) -> Made:
        numbers = random.integers(0, 16, (outputs, inputs))
        zeros = random.integers(0, 16, (outputs, inputs // group))
        scales = _scales(random, outputs, inputs // group, np.float16)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": words(numbers.T, 1, 4, order),
            "qzeros": words(zeros.T, 1, 4, order),
            "scales": np.ascontiguousarray(scales.T),
        }
        return tensors, (numbers - spread(zeros, inputs)) * spread(scales, inputs)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    config |= {"version": "gemm", "modules_to_not_convert": None}
    return Format(config=config, write=write)


def gptq(bits: int, group: int, *, version: int = 1, symmetric: bool = False) -> Format:
    def write(random: np.random.Generator, outputs: int, inputs: int) -> Made:
        half = 1 << (bits - 1)
        numbers = random.integers(0, 2 * half, (outputs, inputs))
        groups = (outputs, inputs // group)
        zeros = random.integers(0, 2 * half, groups) if not symmetric else np.full(groups, half)
        scales = (_scales(random, *groups, np.float16) * np.float16(8 / half)).astype(np.float16)
        stored = (zeros - 1) % (2 * half) if version == 1 else zeros
        tensors = {
            "qweight": words(numbers.T, 0, bits),
            "qzeros": words(stored.T, 1, bits),
            "scales": np.ascontiguousarray(scales.T),
            "g_idx": (np.arange(inputs) // group).astype(np.int32),
        }
        return tensors, (numbers - spread(zeros, inputs)) * spread(scales, inputs)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric}
    config |= {"desc_act": False, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    return Format(config=config, write=write)


def _bitsandbytes() -> Format:
    def write(random: np.random.Generator, outputs: int, inputs: int) -> Made:
        codes = random.integers(-127, 128, (outputs, inputs)).astype(np.int8)
        largest = random.uniform(0.1, 0.3, outputs).astype(np.float32)
        tensors = {"weight": codes, "SCB": largest, "weight_format": np.array(0, np.uint8)}
        return tensors, codes * (largest[:, None].astype(np.float64) / 127)

    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    config |= {"llm_int8_skip_modules": ["lm_head", "gate"], "llm_int8_threshold": 6.0}
    return Format(config=config, write=write)


def fp8_blocks(outputs_each: int, inputs_each: int) -> Format:
    def write(random: np.random.Generator, outputs: int, inputs: int) -> Made:
        codes = random.standard_normal((outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
        shape = (-(-outputs // outputs_each), -(-inputs // inputs_each))
        scales = random.uniform(0.05, 0.2, shape).astype(np.float32)
        whole = np.repeat(np.repeat(scales, outputs_each, 0), inputs_each, 1)[:outputs, :inputs]
        return {"weight": codes, "weight_scale_inv": scales}, codes.astype(np.float64) * whole

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    config |= {"weight_block_size": [outputs_each, inputs_each]}
    return Format(config=config, write=write)


FORMATS: Mapping[str, Format] = {
    "packed-4-groups": pack_quantized(4, 32),
    "packed-4-groups-zeros": pack_quantized(4, 16, symmetric=False),
    "packed-4-channels-zeros": pack_quantized(4, None, symmetric=False),
    "packed-8-groups-zeros": pack_quantized(8, 32, symmetric=False),
    "packed-8-channels": pack_quantized(8, None),
    "mxfp4": _float4("mx"),
    "nvfp4": _float4("nv"),
    "modelopt-fp8": _modelopt("FP8"),
    "modelopt-nvfp4": _modelopt("NVFP4"),
    "awq": _awq(16),
    "gptq": gptq(4, 32),
    "gptq-v2": gptq(4, 32, version=2),
    "gptq-symmetric": gptq(4, 16, symmetric=True),
    "gptq-8": gptq(8, 32),
    "bitsandbytes-8": _bitsandbytes(),
    "fp8-blocks": fp8_blocks(24, 32),
    "fp8-ragged-blocks": fp8_blocks(48, 40),
}
