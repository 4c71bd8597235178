"""Writes a checkpoint with codes for the weights of linear layers, as compressed-tensors has it.

The weights of a checkpoint are read, made into codes and written one after the other. All else is
copied. Which tensors are weights of linear layers, the model's own map of its checkpoint says.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
from flax import nnx

from jaxllm.errors import UnsupportedModelError, ValidationError
from jaxllm.files import read_json
from jaxllm.layers.linear import Linear
from jaxllm.layers.moe import Experts
from jaxllm.layers.router import Router
from jaxllm.models.architecture import read_architecture
from jaxllm.models.checkpoint_map import Concat, InHalves, Rows, Shape, Source, Stack, Tensor
from jaxllm.models.registry import ModelRegistry
from jaxllm.models.spans import Beside
from jaxllm.weights.checkpoint import Checkpoint, some_of
from jaxllm.weights.loader import parameters_of, sources_of

Format = Literal["int8", "fp8", "int4"]
FORMATS: tuple[Format, ...] = ("int8", "fp8", "int4")
_FILE_BYTES = 2 << 30  # about; a file holds whole tensors
_ROWS_AT_ONCE = 1024
_WEIGHT = ".weight"
_NEVER = ".shared_expert_gate.weight"  # of one output
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
        groups, ignored = _choose(config, shapes, kind, group_size)
        if not groups:
            raise UnsupportedModelError(
                f"{model_dir} has no weights [out, in] of linear layers whose inputs are a "
                f"multiple of {group_size}"
            )
        described = config | {"quantization_config": _describe(kind, group_size, ignored)}
        _check_read(described, _names_of(shapes, groups, kind))
        out.mkdir(parents=True, exist_ok=True)
        before = sum(its.num_bytes for its in checkpoint.tensors.values())
        writer = _Writer(out)
        errors = []
        for name in checkpoint.tensors:
            weights = checkpoint.read(name)
            if name not in groups:
                writer.add(name, np.array(weights))
            else:
                module = name.removesuffix(_WEIGHT)
                leaves, error = _as_codes(weights, kind, groups[name])
                for leaf, values in leaves.items():
                    writer.add(f"{module}.{leaf}", values)
                errors.append(LayerError(module, error))
            checkpoint.release(name)
    after = writer.finish()
    (out / _CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    _copy_others(model_dir, out)
    return Written(
        errors=tuple(errors),
        num_kept=len(shapes) - len(groups),
        bytes_before=before,
        bytes_after=after,
    )


def _choose(
    config: dict[str, Any], shapes: Mapping[str, Shape], kind: Format, group_size: int
) -> tuple[dict[str, int], list[str]]:
    """The tensors that become codes, with the inputs that share a scale, and the names of the
    modules that do not."""
    architecture = read_architecture(config)
    if ModelRegistry.has_own_class(architecture.name):
        raise UnsupportedModelError(f"{architecture.name} runs by a class of its own")
    model = ModelRegistry.resolve([architecture.name]).abstract(architecture, np.float32)
    modules = {
        ".".join(map(str, path))
        for path, module in nnx.iter_graph(model)
        if isinstance(module, Linear | Experts) and not isinstance(module, Router)
    }
    sources = sources_of(parameters_of(model), model.checkpoint_map.for_tensors(shapes))
    linear = {
        tensor.name
        for name, source in sources.items()
        if name.rpartition(".")[0] in modules
        for tensor in _tensors(source)
        if tensor.name.endswith(_WEIGHT) and not tensor.name.endswith(_NEVER)
    }
    heads = {tensor.name for tensor in _tensors(sources.get("lm_head.weight"))}
    groups = {
        name: group
        for name, shape in shapes.items()
        if name in linear and len(shape) == 2 and (group := _group(shape[1], kind, group_size))
    }
    ignored = {
        name.removesuffix(_WEIGHT)
        for name, shape in shapes.items()
        if name not in groups
        and name.endswith(_WEIGHT)
        and len(shape) == 2
        and ("embed" not in name or name in heads)
    }
    # A tied head has no tensor, and is a linear layer in other programs.
    return groups, sorted(ignored | {"lm_head"})


def _check_read(described: dict[str, Any], names: Mapping[str, None]) -> None:
    """Raise unless tensors of these names would be read as config.json describes them."""
    architecture = read_architecture(described)
    model = ModelRegistry.resolve([architecture.name]).abstract(architecture, np.float32)
    sources = sources_of(parameters_of(model), model.checkpoint_map.for_tensors(names))
    missing = {rows.tensor.name for its in sources.values() for rows in its.rows()} - names.keys()
    if missing:
        raise UnsupportedModelError(
            f"the checkpoint would lack {some_of(sorted(missing))}: this form is not supported "
            "for layers that are stored in this way"
        )


def _names_of(
    shapes: Mapping[str, Shape], groups: Mapping[str, int], kind: Format
) -> dict[str, None]:
    """The names of the tensors that are written."""
    codes = ("weight",) if kind == "fp8" else ("weight_packed", "weight_shape")
    return dict.fromkeys(
        written
        for name in shapes
        for written in (
            (f"{name.removesuffix(_WEIGHT)}.{leaf}" for leaf in (*codes, "weight_scale"))
            if name in groups
            else (name,)
        )
    )


def _tensors(source: Source | None) -> Iterator[Tensor]:
    """The tensors whose rows a source has: not transposed, nor seen in another shape."""
    match source:
        case Tensor():
            yield source
        case Rows(tensor=tensor):
            yield tensor
        case InHalves(source=source) | Beside(whole=source):
            yield from _tensors(source)
        case Concat(sources=sources) | Stack(sources=sources):
            for one in sources:
                yield from _tensors(one)


def _group(num_inputs: int, kind: Format, group_size: int) -> int | None:
    """The inputs that share a scale; None: they cannot be divided."""
    if kind == "int4":
        return group_size if num_inputs % group_size == 0 else None
    return num_inputs if kind == "fp8" or num_inputs % 4 == 0 else None


def _as_codes(weights: np.ndarray, kind: Format, group: int) -> tuple[dict[str, np.ndarray], float]:
    """The tensors of a module, and the relative error of what they stand for."""
    pieces, wrong, whole = [], 0.0, 0.0
    for first in range(0, len(weights), _ROWS_AT_ONCE):
        rows = weights[first : first + _ROWS_AT_ONCE].astype(np.float32)
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
