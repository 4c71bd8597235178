"""Writes a checkpoint with codes for the weights of linear layers, as compressed-tensors has it.

The weights of a checkpoint are read, made into codes and written one after the other. All else is
copied. A layer's experts are written one by one, also if the checkpoint has them in one tensor.
"""

import json
import shutil
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from jaxllm.errors import UnsupportedModelError, ValidationError
from jaxllm.files import read_json
from jaxllm.models.checkpoint_map import Shape
from jaxllm.quantization.coded_matrices import WEIGHT, Matrix, check_read, find_matrices
from jaxllm.weights.checkpoint import Checkpoint

Format = Literal["int8", "fp8", "int4"]
FORMATS: tuple[Format, ...] = ("int8", "fp8", "int4")
_PACKED = ("weight_packed", "weight_shape", "weight_scale")
_LEAVES = {"int8": _PACKED, "fp8": ("weight", "weight_scale"), "int4": _PACKED}
_ALTERNATIVE = "`jaxllm convert --quantization` writes what an engine holds of it"
_FILE_BYTES = 2 << 30  # about; a file holds whole tensors
_ROWS_AT_ONCE = 1024
_CODES_IN_A_WORD = 4  # of int8
_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
# Shares of the largest weight of a group that the largest code may stand for. What is above it is
# cut, which may cost less than coarser steps for all others.
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)


class LayerError(NamedTuple):
    """How far the weights that codes stand for are from those of the checkpoint."""

    name: str
    relative: float  # the root of the mean square, relative to that of the weights


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written."""

    errors: tuple[LayerError, ...]
    num_kept: int  # tensors that are as they were
    bytes_before: int
    bytes_after: int


def write_quantized(model_dir: Path, out: Path, kind: Format, *, group_size: int = 128) -> Written:
    """Write a model directory with codes in place of the weights of another one."""
    if out.exists() and any(out.iterdir()):
        raise ValidationError(f"{out} is not empty; give a new directory, or remove it")
    config = read_json(model_dir / _CONFIG)
    if config.get("quantization_config") or config.get("compression_config"):
        raise ValidationError(
            f"{model_dir} is quantised already; give the checkpoint that it was made of"
        )
    with Checkpoint(model_dir) as checkpoint:
        shapes = {name: its.shape for name, its in checkpoint.tensors.items()}
        matrices_of, head = find_matrices(config, shapes)
        coded = {
            name: matrices
            for name, matrices in matrices_of.items()
            if all(_group(matrix.shape[1], kind, group_size) for matrix in matrices)
        }
        if not coded:
            raise UnsupportedModelError(
                f"{model_dir} has no weights [out, in] of linear layers whose inputs are a "
                f"multiple of {group_size}; {_ALTERNATIVE}"
            )
        ignored = _modules_of(shapes.keys() - coded.keys(), shapes, head)
        described = config | {"quantization_config": _describe(kind, group_size, ignored)}
        modules = [matrix.module for matrices in coded.values() for matrix in matrices]
        written = {f"{module}.{leaf}" for module in modules for leaf in _LEAVES[kind]}
        for name in matrices_of.keys() - coded.keys():
            if len(matrices_of[name]) > 1:
                num_inputs = matrices_of[name][0].shape[1]
                raise UnsupportedModelError(
                    f"the {num_inputs} inputs of {name} are no multiple of "
                    f"{f'--group-size {group_size}' if kind == 'int4' else _CODES_IN_A_WORD}, and "
                    f"the experts of a layer have one form; {_ALTERNATIVE}"
                )
        try:
            check_read(described, (shapes.keys() - coded.keys()) | written)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                f"{model_dir} cannot be written with codes: {error}; {_ALTERNATIVE}"
            ) from error
        out.mkdir(parents=True, exist_ok=True)
        before = sum(its.num_bytes for its in checkpoint.tensors.values())
        writer = _Writer(out)
        errors = []
        for name in checkpoint.tensors:
            for matrix in coded.get(name, ()):
                group = _group(matrix.shape[1], kind, group_size) or 0
                leaves, error = _as_codes(matrix, checkpoint, kind, group)
                for leaf, values in leaves.items():
                    writer.add(f"{matrix.module}.{leaf}", values)
                errors.append(LayerError(matrix.module, error))
            if name not in coded:
                writer.add(name, np.array(checkpoint.read(name)))
            checkpoint.release(name)
    after = writer.finish()
    (out / _CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    _copy_others(model_dir, out)
    return Written(
        errors=tuple(errors),
        num_kept=len(shapes) - len(coded),
        bytes_before=before,
        bytes_after=after,
    )


def _modules_of(kept: Set[str], shapes: Mapping[str, Shape], head: str | None) -> list[str]:
    """The modules of kept tensors that may be linear layers in other programs. A tied head has no
    tensor, and is one of them."""
    return sorted(
        {"lm_head"}
        | {
            name.removesuffix(WEIGHT)
            for name in kept
            if name.endswith(WEIGHT)
            and len(shapes[name]) == 2
            and ("embed" not in name or name == head)
        }
    )


def _group(num_inputs: int, kind: Format, group_size: int) -> int | None:
    """The inputs that share a scale; None: they cannot be divided."""
    if kind == "int4":
        return group_size if num_inputs % group_size == 0 else None
    return num_inputs if kind == "fp8" or num_inputs % _CODES_IN_A_WORD == 0 else None


def _as_codes(
    matrix: Matrix, checkpoint: Checkpoint, kind: Format, group: int
) -> tuple[dict[str, np.ndarray], float]:
    """The tensors of a module, and the relative error of what they stand for."""
    *index, _, columns = matrix.box
    num_rows, num_inputs = matrix.shape
    pieces, wrong, whole = [], 0.0, 0.0
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        end = min(first + _ROWS_AT_ONCE, num_rows)
        rows = np.empty((end - first, num_inputs), np.float32)
        target = rows.reshape(*[1] * len(index), *rows.shape)
        matrix.source.copy(checkpoint, (*index, slice(first, end), columns), target)
        codes, scales = _round(rows.reshape(len(rows), -1, group), kind)
        stood_for = (codes.astype(np.float32) * scales[..., None]).reshape(rows.shape)
        wrong += float(np.square(stood_for - rows, dtype=np.float64).sum())
        whole += float(np.square(rows, dtype=np.float64).sum())
        pieces.append((codes.reshape(rows.shape), scales))
    codes, scales = (np.concatenate(its) for its in zip(*pieces, strict=True))
    leaves = {"weight_scale": scales}
    if kind == "fp8":
        leaves["weight"] = codes
    else:
        leaves["weight_packed"] = pack(codes, 4 if kind == "int4" else 8)
        leaves["weight_shape"] = np.array(codes.shape, np.int64)
    return leaves, (wrong / whole) ** 0.5 if whole else 0.0


def _round(weights: np.ndarray, kind: Format) -> tuple[np.ndarray, np.ndarray]:
    """The codes of weights [rows, groups, inputs], and their scales [rows, groups]."""
    largest = np.abs(weights).max(axis=-1)
    largest = np.where(largest > 0, largest, np.float32(1))
    if kind == "fp8":
        scales = largest / np.float32(448)
        return (weights / scales[..., None]).astype(ml_dtypes.float8_e4m3fn), scales
    if kind == "int8":
        scales = largest / np.float32(127)
        return np.rint(weights / scales[..., None]).astype(np.int8), scales
    best_codes, best_scales, least = None, largest, np.full(largest.shape, np.inf, np.float32)
    for share in _SHARES:
        scales = (largest * np.float32(share / 7.5)).astype(np.float32)
        codes = np.clip(np.rint(weights / scales[..., None]), -8, 7)
        error = np.square(codes * scales[..., None] - weights).sum(axis=-1)
        is_less = error < least
        least = np.where(is_less, error, least)
        best_scales = np.where(is_less, scales, best_scales)
        best_codes = (
            codes if best_codes is None else np.where(is_less[..., None], codes, best_codes)
        )
    assert best_codes is not None
    return best_codes.astype(np.int8), best_scales


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [out, in] of so many bits in int32 [out, in / codes per word], the first in the lowest
    bits, with half of their range added."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = codes.astype(np.int32) + (1 << bits - 1)
    words = numbers.reshape(len(codes), -1, len(shifts)).astype(np.uint32) << shifts
    return np.bitwise_or.reduce(words, axis=-1).view(np.int32)


def _describe(kind: Format, group_size: int, ignored: list[str]) -> dict[str, Any]:
    """The quantization_config, as compressed-tensors reads it."""
    weights: dict[str, Any] = {
        "num_bits": 4 if kind == "int4" else 8,
        "type": "float" if kind == "fp8" else "int",
        "symmetric": True,
        "strategy": "group" if kind == "int4" else "channel",
        "dynamic": False,
    }
    if kind == "int4":
        weights["group_size"] = group_size
    # Integers are packed where products have 16 bits; `int-quantized` is for products of 8.
    layout = "float-quantized" if kind == "fp8" else "pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


class _Writer:
    """Writes tensors into files of a limited size, and an index if there are several."""

    def __init__(self, out: Path):
        self._out = out
        self._held: dict[str, np.ndarray] = {}
        self._files: list[list[str]] = []
        self._num_bytes = 0

    def add(self, name: str, values: np.ndarray) -> None:
        self._held[name] = np.ascontiguousarray(values)
        self._num_bytes += values.nbytes
        if sum(its.nbytes for its in self._held.values()) >= _FILE_BYTES:
            self._flush()

    def finish(self) -> int:
        """Write what is left, and the index; return the bytes of all tensors."""
        self._flush()
        if len(self._files) == 1:
            self._part(0).rename(self._out / "model.safetensors")
            return self._num_bytes
        names = {}
        for index, its in enumerate(self._files):
            file = f"model-{index + 1:05}-of-{len(self._files):05}.safetensors"
            self._part(index).rename(self._out / file)
            names |= dict.fromkeys(its, file)
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": names}
        (self._out / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return self._num_bytes

    def _part(self, index: int) -> Path:
        return self._out / f"part-{index}"

    def _flush(self) -> None:
        from safetensors.numpy import save_file

        if self._held:
            save_file(self._held, self._part(len(self._files)), metadata={"format": "pt"})
            self._files.append(list(self._held))
            self._held = {}


def _copy_others(model_dir: Path, out: Path) -> None:
    """Copy all files but the weights: tokenizer, template, defaults of sampling."""
    for file in model_dir.iterdir():
        is_weights = file.suffix in (".safetensors", ".gguf", ".bin", ".pt") or file.name == _INDEX
        if file.is_file() and not is_weights and file.name != _CONFIG:
            shutil.copyfile(file, out / file.name)
